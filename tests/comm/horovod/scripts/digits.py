"""A script as people have them for Horovod, but for the import: digits instead of MNIST, and ranks with uneven data.

torchrun --nproc-per-node 2 tests/comm/horovod/scripts/digits.py
mpirun -n 2 python tests/comm/horovod/scripts/digits.py
"""

import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits

import hybridpar.horovod as hvd

parser = argparse.ArgumentParser(description="Digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--test-batch-size", type=int, default=200)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--seed", type=int, default=42)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=3)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=3)
        self.fc1 = nn.Linear(80, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = x.flatten(1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def data():
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[shuffled], labels[shuffled]
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def share(count, rank, size):
    # Rank r has r + 1 parts of the data: nobody has as much as another.
    parts = size * (size + 1) // 2
    return slice(count * (rank * (rank + 1) // 2) // parts, count * ((rank + 1) * (rank + 2) // 2) // parts)


def train(epoch, model, optimizer, images, labels, args):
    model.train()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
    for batch_idx, batch in enumerate(order.split(args.batch_size)):
        optimizer.zero_grad()
        output = model(images[batch])
        loss = F.nll_loss(output, labels[batch])
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and hvd.rank() == hvd.size() - 1:
            print(f"Train Epoch: {epoch} [{batch_idx * len(batch)}/{len(images)}]\tLoss: {loss.item():.6f}")
    # Horovod: the others may have more batches.
    last = hvd.join()
    # Horovod: who joined early has not taken the last steps.
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)


def metric_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name)
    return avg_tensor.item()


def test(model, images, labels, args):
    model.eval()
    test_loss = 0.0
    test_accuracy = 0.0
    with torch.no_grad():
        for batch, target in zip(images.split(args.test_batch_size), labels.split(args.test_batch_size), strict=True):
            output = model(batch)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += (output.argmax(1) == target).sum().item()
    test_loss /= len(images)
    test_accuracy /= len(images)
    # Horovod: average metric values across workers.
    return metric_average(test_loss, "avg_loss"), metric_average(test_accuracy, "avg_accuracy")


def main():
    args = parser.parse_args()
    # Horovod: initialize library.
    hvd.init()
    torch.manual_seed(args.seed + hvd.rank())
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)

    train_images, train_labels, test_images, test_labels = data()
    mine = share(len(train_images), hvd.rank(), hvd.size())
    model = Net()
    # Horovod: scale learning rate by the number of workers.
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    # Horovod: broadcast parameters & optimizer state.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: (optional) compression algorithm.
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    # Horovod: wrap optimizer with DistributedOptimizer.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    for epoch in range(1, args.epochs + 1):
        train(epoch, model, optimizer, train_images[mine], train_labels[mine], args)
        # Horovod: the test data are dealt out by rank; their last few are left out, so that averages are right.
        even = len(test_images) // hvd.size()
        part = slice(hvd.rank() * even, (hvd.rank() + 1) * even)
        loss, accuracy = test(model, test_images[part], test_labels[part], args)
        if hvd.rank() == 0:
            print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%")
    weights = [parameter.sum().item() for parameter in model.parameters()]
    if hvd.rank() == 0:
        print("RESULT " + json.dumps({"size": hvd.size(), "loss": loss, "accuracy": accuracy, "weights": weights}))


if __name__ == "__main__":
    main()

"""Whole runs: numbers of ranks, resuming, modes, what is exported, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import hybridpar as hp
from recipes.bert import evaluate, export, train
from recipes.bert.config import OptimizerConfig, TextConfig, TrainConfig
from recipes.bert.tasks import open_task
from recipes.bert.trained import load_trained
from recipes.common.config import RowsConfig
from tests.recipes.bert.runs import losses, save_model, small_config, train_threads, write_text

ROOT = Path(__file__).parents[3]
# Float32 rounding, amplified by the steps that follow it.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), text)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, text: Path, model: Path) -> tuple[Path, dict[int, float]]:
    """Folder and losses of a run on two ranks."""
    out = tmp_path_factory.mktemp("reference")
    results = train_threads(2, small_config(out, text, model))
    assert results[0] == results[1]
    curve = losses(out)
    assert sorted(curve) == list(range(1, 31))
    assert curve[30] < 0.8 * curve[1], "nothing was learned"
    return out, curve


def _assert_same(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found == pytest.approx({step: expected[step] for step in found}, rel=TOLERANCE)


def test_resuming_on_two_then_three_then_one_rank_continues_the_curve(
    reference: tuple[Path, dict[int, float]], text: Path, model: Path, tmp_path: Path
) -> None:
    for ranks, steps in ((2, 10), (3, 20), (1, 30)):
        rows = RowsConfig(rule="striped" if ranks == 3 else "even")
        train_threads(ranks, small_config(tmp_path, text, model, steps=steps, head=rows))
    found = losses(tmp_path)
    assert sorted(found) == list(range(1, 31))
    _assert_same(found, reference[1])


@pytest.mark.parametrize("change", ["data mode", "accumulation"])
def test_how_the_work_is_cut_does_not_change_the_curve(
    reference: tuple[Path, dict[int, float]], text: Path, model: Path, tmp_path: Path, change: str
) -> None:
    config = small_config(tmp_path, text, model, steps=12)
    if change == "data mode":
        train_threads(2, dataclasses.replace(config, mode="data"))
    else:
        train_threads(3, dataclasses.replace(config, accumulate=3))
    _assert_same(losses(tmp_path), reference[1])


@pytest.mark.parametrize("change", ["lamb", "rows", "bfloat16", "sampled"])
def test_other_optimizers_and_formats_learn_too(text: Path, model: Path, tmp_path: Path, change: str) -> None:
    config = small_config(tmp_path, text, model)
    options = config.optimizer
    changed = {
        "lamb": {"optimizer": dataclasses.replace(options, name="lamb", learning_rate=0.03)},
        "rows": {
            "optimizer": dataclasses.replace(options, clip=0.0),
            "head": RowsConfig(optimizer="adamw"),
            "accumulate": 3,
        },
        "bfloat16": {"precision": "bfloat16"},
        "sampled": {"head": RowsConfig(sample_rate=0.5)},
    }[change]
    (held_out, _) = train_threads(2, dataclasses.replace(config, **changed))
    assert held_out["perplexity"] < 40  # of 96 tokens


def test_the_export_is_loaded_by_transformers_and_predicts_the_same(
    reference: tuple[Path, dict[int, float]], text: Path, tmp_path: Path
) -> None:
    out, _ = reference
    export.main(export.Options(checkpoint=out, out=tmp_path))
    theirs, tokenizer = AutoModelForMaskedLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert not theirs.config.tie_word_embeddings
    assert len(tokenizer("rank " * 99, truncation=True)["input_ids"]) == 32  # the positions of the model
    encoded = tokenizer("Every rank [MASK] the bucket on the host.", return_tensors="pt")
    ours = load_trained(out)
    assert encoded["input_ids"][0, 1:-1].tolist() != ours.tokenizer.encode_batch(["Every rank"])[0]
    position = torch.nonzero(encoded["input_ids"].flatten() == tokenizer.mask_token_id)[:, 0]
    with torch.no_grad():
        logits = theirs(**encoded).logits[0, position]
        scores, ids = ours.head.predict(ours.encoder(encoded["input_ids"], None, position), k=5)
    expected = logits.topk(5)
    torch.testing.assert_close(scores, expected.values, rtol=1e-5, atol=1e-5)
    assert ids.tolist() == expected.indices.tolist()


def test_evaluation_of_a_checkpoint_gives_what_the_run_found(
    text: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (found, _) = train_threads(2, small_config(tmp_path, text, model, steps=3))
    evaluate.main(evaluate.Options(checkpoint=tmp_path))
    report = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert report["results"]["model"] == pytest.approx(found, rel=1e-5)
    assert report["results"]["uniform"]["perplexity"] == load_trained(tmp_path).head.num_classes
    assert f"{found['perplexity']:,.2f}" in capsys.readouterr().out
    other = write_text(tmp_path / "other.txt", documents=3)
    evaluate.main(evaluate.Options(checkpoint=tmp_path, path=(other,), out=tmp_path / "other"))
    again = json.loads((tmp_path / "other" / "evaluation.json").read_text())
    assert 1 < again["results"]["model"]["perplexity"] < 200


def test_a_run_under_torchrun_leaves_plots_a_report_and_a_model(text: Path, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m",
        "recipes.bert.train", "embedded", "--data.path", str(text), "--data.length", "16", "--data.vocab-size", "96",
        "--model.hidden", "16", "--model.heads", "2", "--steps", "6", "--batch", "8", "--run.evaluate-every", "3",
        "--data.held-out", "0.2", "--run.out", str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("On text never trained on:", "model ", "unigram ", "uniform "):
        assert line in done.stdout
    for name in ("loss", "throughput", "held-out-perplexity", "held-out-accuracy"):
        assert (tmp_path / "plots" / f"{name}.png").stat().st_size > 5000
    assert list((tmp_path / "tensorboard").iterdir())
    assert AutoModelForMaskedLM.from_pretrained(tmp_path / "export").config.vocab_size <= 96
    assert "Loading weights" not in done.stderr


TEXTS = ["every bucket number 77 leaves", "every rank number 77 leaves"]


def _table(path: Path, rows: int = 120) -> Path:
    kinds = (("rank", "many") if number % 3 else ("bucket", "few") for number in range(rows))
    lines = (f"every {noun} number {number} leaves,{label}" for number, (noun, label) in enumerate(kinds))
    path.write_text("text,label\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("mode", ["data", "hybrid"])
def test_texts_are_classified_and_the_export_predicts_the_same(
    text: Path, model: Path, tmp_path: Path, mode: str
) -> None:
    table = _table(tmp_path / "table.csv")
    data = TextConfig(path=(table,), length=16, held_out=0.25)
    optimizer = OptimizerConfig(learning_rate=5e-3, schedule="constant", warmup=0.0)
    config = small_config(
        tmp_path / "out", table, model, task="classify", data=data, mode=mode, steps=60, optimizer=optimizer
    )
    for found in train_threads(2, config):
        assert found["accuracy"] == 1.0
        assert found["f1"] == 1.0
    export.main(export.Options(checkpoint=config.run.out, out=tmp_path / "export"))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert theirs.config.id2label == {0: "few", 1: "many"}
    with torch.no_grad():
        logits = theirs(**tokenizer(TEXTS, return_tensors="pt", padding=True)).logits
    assert logits.argmax(-1).tolist() == [0, 1]
    evaluate.main(evaluate.Options(checkpoint=config.run.out, path=(_table(tmp_path / "other.csv", rows=30),)))
    report = json.loads((config.run.out / "evaluation" / "evaluation.json").read_text())
    assert report["results"]["model"]["accuracy"] == 1.0
    assert report["results"]["most frequent"]["accuracy"] == pytest.approx(2 / 3)


def _refused(config: TrainConfig, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        train.main(config)


def test_an_empty_corpus_is_refused(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n\n")
    _refused(small_config(tmp_path / "out", empty, model), r"empty\.txt: expected text")


def test_text_that_is_not_utf8_is_named_with_its_line(model: Path, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("ein Satz\n\nnoch einer über Bäume\n".encode("latin-1"))
    _refused(small_config(tmp_path / "out", latin, model), r"latin\.txt.*line 3.*iconv")


def test_a_tokenizer_of_another_size_than_the_model_is_refused(text: Path, model: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nevery\nrank\nthe\nbucket\n")
    config = small_config(tmp_path / "out", text, model)
    data = dataclasses.replace(config.data, tokenizer=vocabulary)
    _refused(dataclasses.replace(config, data=data), r"vocab\.txt: expected a tokenizer with 9\d tokens.*got 9;")


def test_a_corrupt_cache_is_named_with_the_way_out(text: Path, model: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, text, model, steps=1)
    train.main(config)
    (tokens,) = (tmp_path / "cache").glob("*/train.tokens")
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    _refused(config, rf"{tokens}: the token cache is corrupt .*; delete {tokens.parent}")


def test_text_that_was_changed_is_no_place_to_go_on(model: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    config = small_config(tmp_path / "out", text, model, steps=1)
    train.main(config)
    before = text.read_text()
    write_text(text, documents=70)
    _refused(dataclasses.replace(config, steps=2), "trained with data tokens")
    evaluate.main(evaluate.Options(checkpoint=config.run.out))  # the run has lost nothing
    text.write_text(before)
    train.main(dataclasses.replace(config, steps=2))


def test_another_tokenizer_is_refused_before_the_run_has_lost_its_own(text: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path / "out", text, None, steps=1)
    train.main(config)
    kept = (config.run.out / "tokenizer" / "vocab.txt").read_text()
    other = tmp_path / "vocab.txt"
    other.write_text("\n".join(sorted(kept.split())) + "\n")
    longer = dataclasses.replace(config, steps=2)
    data = dataclasses.replace(config.data, tokenizer=other)
    _refused(dataclasses.replace(longer, data=data), f"trained with another tokenizer than {other}")
    data = dataclasses.replace(config.data, vocab_size=80)
    _refused(dataclasses.replace(longer, data=data), "trained with another --data.vocab-size")
    assert (config.run.out / "tokenizer" / "vocab.txt").read_text() == kept
    train.main(longer)


def test_without_a_checkpoint_settings_of_the_tokenizer_count_anew(text: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, text, None, steps=1)
    train.main(config)
    shutil.rmtree(tmp_path / "checkpoints")
    train.main(dataclasses.replace(config, data=dataclasses.replace(config.data, vocab_size=80)))
    assert load_trained(tmp_path).head.num_classes == 80


def test_sequences_longer_than_a_pretrained_model_takes_are_refused(text: Path, model: Path, tmp_path: Path) -> None:
    config = small_config(tmp_path, text, model)
    data = dataclasses.replace(config.data, length=64)
    _refused(dataclasses.replace(config, data=data), f"expected at most 32, the positions of {model}, got 64")


def test_a_table_in_the_order_of_its_labels_is_judged_all_over(text: Path, model: Path, tmp_path: Path) -> None:
    rows = [f"{label} number {number},{label}" for label in ("few", "many") for number in range(40)]
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "\n".join(rows) + "\n")
    data = TextConfig(path=(table,), length=16, held_out=0.5, held_out_samples=10)
    task = open_task(small_config(tmp_path / "out", text, model, task="classify", data=data), hp.Group.alone())
    assert 0.3 < task.baselines["most frequent"]["accuracy"] < 0.7
    assert "10 of " in task.summary


@pytest.mark.parametrize(("option", "value"), [("samples", -1), ("batch", 0), ("device", "foo"), ("device", "cuda:77")])
def test_evaluation_refuses_options_that_cannot_be(tmp_path: Path, option: str, value: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        evaluate.Options(checkpoint=tmp_path, **{option: value})


def test_a_folder_without_a_model_is_refused(text: Path, tmp_path: Path) -> None:
    _refused(small_config(tmp_path / "out", text, tmp_path), "expected a folder with")


def test_sequences_fewer_than_ranks_are_refused(text: Path, model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one sequence for each of 3 ranks"):
        train_threads(3, small_config(tmp_path, text, model, batch=4, accumulate=2))


def test_a_run_that_was_trained_elsewhere_is_no_bert(tmp_path: Path) -> None:
    step = tmp_path / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text(json.dumps({"extra": {"recipe": {"model": "convnet"}}, "step": 1}))
    with pytest.raises(ValueError, match=r"not written by recipes\.bert"):
        load_trained(tmp_path)

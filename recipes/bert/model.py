"""The encoders: Hugging Face's BERT without its output layer, which is the sharded head.

# Note [names]
``transformers`` keeps the output layer of its models as ``cls.predictions.decoder`` (masked tokens) or ``classifier``
(texts). Here both are the rows of a ``ShardedClassifier`` with linear softmax and bias. All other weights keep their
names under the two prefixes of ``_PREFIXES``. The output layer is not tied to the input table:
``tie_word_embeddings`` of the configuration is false.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, PreTrainedModel
from transformers.models.bert.modeling_bert import BertPredictionHeadTransform
from transformers.utils import logging as hf_logging

from recipes.bert.config import ModelConfig

log = logging.getLogger("recipes")

EncoderT = TypeVar("EncoderT", bound="Encoder")

Rows = tuple[Tensor, Tensor]
"""Weight [K, D] and bias [K] of an output layer."""

# Where transformers saved two names of one tensor, it left one of them out: see to_transformers.
_OTHER_NAMES = {"cls.predictions.decoder.bias": "cls.predictions.bias"}


class Encoder(nn.Module, ABC):
    """Token ids to the features [m, D] that the head classifies.

    Attributes:
        bert: the layers.
        config: their sizes; of the whole model as ``transformers`` would build it, but for the output layer's.
    """

    bert: BertModel
    config: BertConfig

    prefixes: ClassVar[Mapping[str, str]]
    """Names of parts here, and of the same parts in ``transformers``."""
    decoder: ClassVar[str]
    """Name of the output layer in ``transformers``."""
    whole: ClassVar[type[PreTrainedModel]]
    """The model of ``transformers`` that this encoder and a head make up."""

    @abstractmethod
    def forward(self, *inputs: Tensor | None) -> Tensor: ...

    def to_transformers(self, rows: Rows, labels: Mapping[int, str] | None = None) -> PreTrainedModel:
        """The model of ``transformers`` with this encoder's weights and the head's rows, in evaluation mode.

        Args:
            rows: of all classes, in the order of their ids.
            labels: names of the classes, where they have some.
        """
        config = BertConfig(**{**self.config.to_dict(), "tie_word_embeddings": False})
        if labels is not None:
            config.id2label = dict(labels)
            config.label2id = {name: number for number, name in labels.items()}
        state = {f"{self.decoder}.weight": rows[0], f"{self.decoder}.bias": rows[1]}
        for name, value in self.state_dict().items():
            part, _, rest = name.partition(".")
            state[f"{self.prefixes[part]}.{rest}"] = value
        if self.whole is BertForMaskedLM:
            # A second name of the bias. Were it the same memory, transformers would save one of them only, and read
            # zeros for the other, as it does not tie them in an untied model.
            state["cls.predictions.bias"] = rows[1].clone()
        return _assemble(self.whole, config, {name: value.detach().cpu() for name, value in state.items()})


class MaskedEncoder(Encoder):
    """Features of the masked positions only: those of ``BertForMaskedLM`` before its decoder."""

    prefixes: ClassVar[Mapping[str, str]] = {"bert": "bert", "transform": "cls.predictions.transform"}
    decoder = "cls.predictions.decoder"
    whole = BertForMaskedLM

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config, add_pooling_layer=False)
        self.transform = BertPredictionHeadTransform(config)
        _initialise(self.transform, config)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Ids int64 [b, S], attention mask [b, S] or None where nothing is padded, and positions int64 [m] among the
        b * S flattened ones, to features [m, D].
        """
        ids, attention, positions = inputs
        assert ids is not None and positions is not None
        if len(ids) == 0:
            return self.transform.dense.weight.new_zeros(0, self.config.hidden_size)
        hidden = self.bert(input_ids=ids, attention_mask=attention).last_hidden_state
        features: Tensor = self.transform(hidden.flatten(0, 1)[positions])
        return features


class TextEncoder(Encoder):
    """One feature of each text: that of ``BertForSequenceClassification`` before its classifier."""

    prefixes: ClassVar[Mapping[str, str]] = {"bert": "bert"}
    decoder = "classifier"
    whole = BertForSequenceClassification

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config, add_pooling_layer=True)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Ids, attention mask or None, and token types int64 [b, S] to features [b, D]."""
        ids, attention, types = inputs
        assert ids is not None
        if len(ids) == 0:
            return self.bert.embeddings.word_embeddings.weight.new_zeros(0, self.config.hidden_size)
        pooled = self.bert(input_ids=ids, attention_mask=attention, token_type_ids=types).pooler_output
        features: Tensor = self.dropout(pooled)
        return features


def new_config(model: ModelConfig, *, vocab_size: int, pad_token_id: int) -> BertConfig:
    """A BERT of the sizes that were asked for, untied."""
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.intermediate,
        max_position_embeddings=model.positions,
        hidden_dropout_prob=model.dropout,
        attention_probs_dropout_prob=model.dropout,
        pad_token_id=pad_token_id,
        tie_word_embeddings=False,
    )


def read_config(folder: Path) -> BertConfig:
    """The configuration of a model that ``transformers`` saved.

    Raises:
        ValueError: there is none, or it is no BERT's.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"expected a folder that transformers saved a model to, got {folder}: it has no config.json")
    try:
        described, _ = BertConfig.get_config_dict(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if described.get("model_type") != "bert":
        raise ValueError(f"expected a model of type bert in {folder}, got {described.get('model_type')!r}")
    return BertConfig(**described)


def expect_room(config: BertConfig, folder: Path, *, length: int, pairs: bool) -> None:
    """Raises ValueError where a model is too small for sequences of ``length`` tokens, or for pairs of texts."""
    if length > config.max_position_embeddings:
        raise ValueError(
            f"data.length: expected at most {config.max_position_embeddings}, the positions of {folder}, got {length}"
        )
    if pairs and config.type_vocab_size < 2:
        raise ValueError(f"{folder}: expected a model with two token types, for pairs of texts, got one")


def load_pretrained(folder: Path, config: BertConfig, encoder: type[EncoderT]) -> tuple[EncoderT, Rows | None]:
    """An encoder with the weights of a model that ``transformers`` saved, and its output layer if it has one.

    What the saved model lacks (a pooler, a transform, an output layer) starts anew, and is named in a log line.

    Raises:
        ValueError: the weights cannot be read, or do not fit the configuration.
    """
    try:
        with without_bars():
            loaded: Any = encoder.whole.from_pretrained(
                folder, config=config, local_files_only=True, dtype=torch.float32, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"the model in {folder} cannot be loaded: {error}") from error
    whole, loading = loaded
    missing = set(loading["missing_keys"])
    rows = None
    if f"{encoder.decoder}.weight" not in missing:
        weights = whole.state_dict()
        bias = f"{encoder.decoder}.bias"
        rows = weights[f"{encoder.decoder}.weight"], weights[_OTHER_NAMES.get(bias, bias) if bias in missing else bias]
    if rows is not None:
        missing -= {f"{encoder.decoder}.bias"}
    if missing:
        log.info("%s lacks %s: they start anew", folder, ", ".join(sorted(missing)))
    result = encoder(config)
    state = {
        f"{mine}.{name.removeprefix(f'{theirs}.')}": value
        for mine, theirs in encoder.prefixes.items()
        for name, value in whole.state_dict().items()
        if name.startswith(f"{theirs}.")
    }
    result.load_state_dict({name: state[name] for name in result.state_dict()})
    return result, rows


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Inside, ``transformers`` shows neither progress bars nor reports of what it loaded."""
    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _assemble(kind: type[PreTrainedModel], config: BertConfig, state: dict[str, Tensor]) -> PreTrainedModel:
    with without_bars():
        loaded: Any = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
        )
    model: PreTrainedModel = loaded[0]
    wrong = {reason: names for reason, names in loaded[1].items() if names}
    assert not wrong, f"the names of transformers have changed: {wrong}"
    model.train(False)
    return model


def _initialise(module: nn.Module, config: BertConfig) -> None:
    """As BERT does: normal weights, biases of zero."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=config.initializer_range)
            nn.init.zeros_(part.bias)

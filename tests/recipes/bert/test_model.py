"""Encoders beside the models of transformers that they are taken from and go back to."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification

from recipes.bert.config import ModelConfig
from recipes.bert.model import MaskedEncoder, TextEncoder, load_pretrained, new_config, read_config

V, D, S = 41, 16, 10
SIZES = ModelConfig(layers=2, hidden=D, heads=2, intermediate=24, positions=S, dropout=0.1)
IDS = torch.arange(3 * S).view(3, S) % V
ATTENTION = torch.ones(3, S, dtype=torch.int64)
ATTENTION[1, 6:] = 0


def _config(**changes: object) -> BertConfig:
    return BertConfig(**{**new_config(SIZES, vocab_size=V, pad_token_id=0).to_dict(), **changes})


def _saved(folder: Path, kind: type[BertForMaskedLM | BertForPreTraining], tied: bool) -> BertForMaskedLM:
    """A model whose weights and biases are all random, as transformers saves it; and as it reads it."""
    torch.manual_seed(1)
    model = kind(_config(tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    reference = kind(_config(tie_word_embeddings=tied))
    reference.load_state_dict(model.state_dict())
    return reference.eval()


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertForPreTraining])
@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_of_either_kind_gives_its_own_logits(
    tmp_path: Path, kind: type[BertForMaskedLM | BertForPreTraining], tied: bool
) -> None:
    theirs = _saved(tmp_path, kind, tied)
    encoder, rows = load_pretrained(tmp_path, read_config(tmp_path), MaskedEncoder)
    assert rows is not None
    positions = torch.tensor([3, 0, 17, 29])
    with torch.no_grad():
        output = theirs(input_ids=IDS, attention_mask=ATTENTION)
        expected = (output.logits if kind is BertForMaskedLM else output.prediction_logits).flatten(0, 1)[positions]
        found = encoder.eval()(IDS, ATTENTION, positions) @ rows[0].T + rows[1]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    again = encoder.to_transformers(rows)
    assert again.config.tie_word_embeddings is False
    again.save_pretrained(tmp_path / "again")
    read = BertForMaskedLM.from_pretrained(tmp_path / "again")
    with torch.no_grad():
        logits = read(input_ids=IDS, attention_mask=ATTENTION).logits.flatten(0, 1)[positions]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_what_a_saved_model_lacks_is_named_and_starts_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _saved(tmp_path, BertForMaskedLM, tied=True)
    with caplog.at_level(logging.INFO, "recipes"):
        encoder, rows = load_pretrained(tmp_path, read_config(tmp_path), TextEncoder)
    assert rows is None
    anew = ("bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight")
    assert f"lacks {', '.join(anew)}: they start anew" in caplog.text
    assert bool(encoder.bert.pooler.dense.weight.isfinite().all())


def test_a_classifier_goes_to_transformers_and_back(tmp_path: Path) -> None:
    encoder = TextEncoder(_config()).eval()
    rows = torch.randn(3, D), torch.randn(3)
    types = torch.zeros_like(IDS)
    types[:, 5:] = 1
    encoder.to_transformers(rows, {0: "a", 1: "b", 2: "c"}).save_pretrained(tmp_path)
    theirs = BertForSequenceClassification.from_pretrained(tmp_path)
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    with torch.no_grad():
        logits = theirs(input_ids=IDS, attention_mask=ATTENTION, token_type_ids=types).logits
        torch.testing.assert_close(encoder(IDS, ATTENTION, types) @ rows[0].T + rows[1], logits, rtol=1e-5, atol=1e-5)
    again, found = load_pretrained(tmp_path, read_config(tmp_path), TextEncoder)
    assert found is not None
    torch.testing.assert_close(found[0], rows[0])
    torch.testing.assert_close(again.state_dict(), encoder.state_dict())


def test_no_sequences_have_no_features() -> None:
    assert MaskedEncoder(_config())(IDS[:0], None, torch.zeros(0, dtype=torch.int64)).shape == (0, D)
    assert TextEncoder(_config())(IDS[:0], None, IDS[:0]).shape == (0, D)


def test_folders_that_hold_no_bert_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match=r"expected a model of type bert in .*, got 'gpt2'"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    _config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_pretrained(tmp_path, read_config(tmp_path), MaskedEncoder)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("layers", 0, "at least 1"), ("heads", 5, "divisor of"), ("dropout", 1.0, r"in \[0, 1\)")],
)
def test_sizes_that_cannot_be_are_refused(field: str, value: float, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.{field}: expected .*{expected}"):
        ModelConfig(**{field: value})

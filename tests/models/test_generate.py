"""Generation: `transformers` writes the same, tokens are drawn from the right numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.llamas import built
from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, load_tokenizer
from titanlite.models import LlamaArgs, get_spec
from titanlite.models.generate import Sampling, generate_ids, probabilities, text_after

ARGS = LlamaArgs(
    dim=48, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=96, multiple_of=16, max_seq_len=80
)
PROMPTS = [[1, 5, 7, 9, 11, 13], [3], [20, 21, 22]]
GREEDY = Sampling(temperature=0)


def _rows(
    model: nn.Module, prompts: list[list[int]] = PROMPTS, **options: object
) -> list[list[int]]:
    """The new ids after each prompt."""
    given: Any = {"max_tokens": 64, "limit": 80, "sampling": GREEDY, "stop_ids": (), **options}
    given = {"head": "output", "vocab": None, **given}
    return [
        list(generate_ids(model, prompt, **{"number": number, **given}))
        for number, prompt in enumerate(prompts)
    ]


def test_greedy_tokens_equal_those_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = built(ARGS)
    spec = get_spec("llama3")
    found = _rows(model, max_tokens=32)
    assert len(set(found[0])) > 10
    assert [len(row) for row in found] == [32] * 3
    config = spec.hf_config(ARGS)
    del config["model_type"], config["architectures"]
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    theirs.load_state_dict(spec.to_hf(model.state_dict(), ARGS))
    for prompt, row in zip(PROMPTS, found, strict=True):
        ids = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=32, eos_token_id=None
        )
        assert ids[0, len(prompt) :].tolist() == row


def test_rows_end_at_stop_ids_and_at_the_limit():
    model = built(ARGS)
    whole = _rows(model)
    stop = whole[0][2]
    ended = _rows(model, stop_ids={stop})
    assert ended == [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert ended[0] == whole[0][:3]
    assert [len(row) for row in _rows(model, limit=20)] == [14, 19, 17]
    assert max(max(row) for row in _rows(model, vocab=40)) < 40


LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.5, -1.0, 2.5]])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.4, 3, 1.0), (1.0, 0, 0.7), (0.4, 4, 0.9), (1.0, 0, 0.01)],
)
def test_distributions_equal_those_of_transformers(temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, LOGITS)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    found = probabilities(LOGITS, Sampling(temperature, top_k, top_p))
    assert torch.allclose(found, scores.softmax(-1), atol=1e-7)
    assert (found > 0).equal(scores > -torch.inf)


def test_tokens_are_drawn_with_these_probabilities_and_seeds_reproduce():
    class Fixed(nn.Module):
        """The same logits for every token."""

        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(LOGITS[0])

        def forward(self, tokens):
            return self.logits.expand(*tokens.shape, -1)

    sampling = Sampling(0.8, 4, 0.95, seed=3)
    options = {"max_tokens": 100, "limit": 200, "sampling": sampling}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    rows = _rows(Fixed(), [[0]] * 20, **options)
    assert torch.get_rng_state().equal(state), "torch's own generator is not used"
    wanted = probabilities(LOGITS, sampling)[0]
    found = torch.tensor(rows).flatten().bincount(minlength=6) / 2000
    error = (wanted * (1 - wanted) / 2000).sqrt()
    assert ((found - wanted).abs() <= 4 * error).all()
    assert (found[wanted == 0] == 0).all()
    assert rows[:8] == _rows(Fixed(), [[0]] * 8, **options)
    assert len({tuple(row) for row in rows}) == 20
    assert rows[3:4] == _rows(Fixed(), [[0]], number=3, **options)


@pytest.mark.parametrize("path", [BUNDLED_TOKENIZER, BUNDLED_SENTENCEPIECE])
def test_the_text_of_ids_keeps_its_first_space(path):
    tokenizer = load_tokenizer(str(path))
    before = "A text,"
    text = " naïve 日本語 🦙🦙 and  so\n\n on – to its end"
    first = tokenizer.encode(before, bos=True)
    ids = tokenizer.encode(before + text)[len(first) - 1 :]
    assert text_after(tokenizer, first, ids) == text

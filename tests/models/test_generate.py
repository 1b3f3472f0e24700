"""Generation: the cache changes nothing, `transformers` writes the same, tokens are drawn from the
right numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from titanlite.data.tokenizer import BUNDLED_SENTENCEPIECE, BUNDLED_TOKENIZER, load_tokenizer
from titanlite.models import LlamaArgs, get_spec
from titanlite.models.generate import KVCache, Sampling, generate, probabilities, text_after

ARGS = LlamaArgs(
    dim=48, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=96, multiple_of=16, max_seq_len=80
)
PROMPTS = [[1, 5, 7, 9, 11, 13], [3], [20, 21, 22]]
GREEDY = Sampling(temperature=0)


def _model(args: LlamaArgs = ARGS) -> nn.Module:
    torch.manual_seed(0)
    model = get_spec("llama3").build(args)
    for parameter in model.parameters():
        nn.init.normal_(
            parameter, mean=float(parameter.ndim == 1), std=0.3 if parameter.ndim == 2 else 0.1
        )
    return model


def _rows(
    model: nn.Module, prompts: list[list[int]] = PROMPTS, **options: object
) -> list[list[int]]:
    """The new ids of each row."""
    steps = list(
        generate(model, prompts, **{"max_tokens": 64, "limit": 80, "sampling": GREEDY, **options})
    )  # type: ignore[arg-type]
    return [[one for one in row if one is not None] for row in zip(*steps, strict=True)]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("tied", [False, True])
def test_64_greedy_tokens_equal_full_passes_and_transformers(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    args = replace(ARGS, tied=tied)
    model = _model(args)
    spec = get_spec("llama3")
    found = _rows(model)
    assert len(set(found[0])) > 10
    assert [len(row) for row in found] == [64] * 3
    assert found == _rows(model, cached=False)
    assert found == [_rows(model, [prompt])[0] for prompt in PROMPTS], (
        "a row does not depend on the others"
    )
    config = {
        k: v for k, v in spec.hf_config(args).items() if k not in ("model_type", "architectures")
    }
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    theirs.load_state_dict(spec.to_hf(model.state_dict(), args), strict=not tied)
    for prompt, row in zip(PROMPTS, found, strict=True):
        ids = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, eos_token_id=None
        )
        assert ids[0, len(prompt) :].tolist() == row
    assert model.training
    assert not any(type(module).__name__ == "CachedAttention" for module in model.modules())


@pytest.mark.slow
def test_sinks_and_windows_in_every_second_block() -> None:
    from tests.models.test_families import VARIANTS, pair

    model, theirs, _, args = pair("gpt_oss")
    assert args == VARIANTS["gpt_oss"][1] and args.window == 24
    found = _rows(model)
    assert len(set(found[0])) > 10
    assert found == _rows(model, cached=False)
    for prompt, row in zip(PROMPTS, found, strict=True):
        ids = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=64, eos_token_id=None
        )
        assert ids[0, len(prompt) :].tolist() == row
    with torch.no_grad():
        for block in model.layers.values():  # type: ignore[operator,union-attr]
            block.attention.sinks.weight += 2
    assert found != _rows(model)


def test_a_window_hides_earlier_tokens_as_full_passes_with_it_do() -> None:
    class Window(nn.Module):
        window = 5

        def prepare(self, doc_ids: object) -> None:
            return None

        def forward(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object
        ) -> torch.Tensor:
            seen = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril().triu(1 - self.window)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    model = _model()
    before = _rows(model)
    for block in model.layers.values():  # type: ignore[operator,union-attr]
        block.attention.inner_attention = Window()
    assert before != _rows(model) == _rows(model, cached=False)
    assert len(KVCache(model, 1, 1)._modules) == 2


def test_rows_end_at_stop_ids_and_at_the_limit() -> None:
    model = _model()
    whole = _rows(model)
    stop = whole[0][5]
    ended = _rows(model, stop_ids={stop})
    assert ended == [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert ended[0] == whole[0][:6]
    assert [len(row) for row in _rows(model, limit=20)] == [14, 19, 17]
    assert max(max(row) for row in _rows(model, vocab=40)) < 40


LOGITS = torch.tensor([[1.0, 3.0, 2.0, 3.5, -1.0, 2.5]])


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (4, 0.9), (1, 1.0), (0, 0.01)]
)
def test_distributions_equal_those_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(temperature)(None, LOGITS)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    found = probabilities(LOGITS, Sampling(temperature, top_k, top_p))
    assert torch.allclose(found, scores.softmax(-1), atol=1e-7)
    assert (found > 0).equal(scores > -torch.inf)


def test_tokens_are_drawn_with_these_probabilities_and_seeds_reproduce() -> None:
    class Fixed(nn.Module):
        """The same logits for every token."""

        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(LOGITS[0])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.logits.expand(*tokens.shape, -1)

    sampling = Sampling(0.8, 4, 0.95, seed=3)
    options = {"max_tokens": 100, "limit": 200, "sampling": sampling}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    rows = _rows(Fixed(), [[0]] * 80, **options)
    assert torch.get_rng_state().equal(state), "torch's own generator is not used"
    wanted = probabilities(LOGITS, sampling)[0]
    found = torch.tensor(rows).flatten().bincount(minlength=6) / 8000
    error = (wanted * (1 - wanted) / 8000).sqrt()
    assert ((found - wanted).abs() <= 4 * error).all()
    assert (found[wanted == 0] == 0).all()
    assert rows[:8] == _rows(Fixed(), [[0]] * 8, **options)
    assert len({tuple(row) for row in rows}) == 80
    assert rows[3:4] == _rows(Fixed(), [[0]], first_row=3, **options)
    assert rows[:1] != _rows(Fixed(), [[0]], **{**options, "sampling": sampling._replace(seed=4)})


@pytest.mark.parametrize("path", [BUNDLED_TOKENIZER, BUNDLED_SENTENCEPIECE])
def test_the_text_of_ids_keeps_its_first_space(path: object) -> None:
    tokenizer = load_tokenizer(str(path))
    before = "A text,"
    text = " naïve 日本語 🦙🦙 and  so\n\n on – to its end"
    first = tokenizer.encode(before, bos=True)
    ids = tokenizer.encode(before + text)[len(first) - 1 :]
    assert text_after(tokenizer, first, ids) == text

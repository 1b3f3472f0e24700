"""Published shapes, counts and FLOPs; the numbers are of the model cards and of published training
logs.
"""

from __future__ import annotations

import pytest

from titanlite.config.model_sections import Model
from titanlite.models import RopeScaling, resolve_args
from titanlite.models.args import model_args
from titanlite.models.counts import count_parameters, flops_per_token
from titanlite.models.llama import LLAMA2, LLAMA3
from titanlite.models.spec import ShapeError

PUBLISHED = {
    ("llama2", "7B"): (4096, 32, 32, 32, 11008, 32000, 6_738_415_616),
    ("llama2", "13B"): (5120, 40, 40, 40, 13824, 32000, 13_015_864_320),
    ("llama2", "70B"): (8192, 80, 64, 8, 28672, 32000, 68_976_648_192),
    ("llama3", "8B"): (4096, 32, 32, 8, 14336, 128256, 8_030_261_248),
    ("llama3", "70B"): (8192, 80, 64, 8, 28672, 128256, 70_553_706_496),
    ("llama3", "3.1-405B"): (16384, 126, 128, 8, 53248, 128256, 405_853_388_800),
    ("llama3", "3.2-1B"): (2048, 16, 32, 8, 8192, 128256, 1_235_814_400),
    # A widely copied table says ffn 11008 for the 3B, and launch files say 2 kv heads for both:
    # wrong.
    ("llama3", "3.2-3B"): (3072, 28, 24, 8, 8192, 128256, 3_212_749_824),
}


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED)
def test_published_shapes_and_exact_counts(family: str, flavor: str) -> None:
    args = resolve_args(family, flavor)
    shape = (args.dim, args.n_layers, args.n_heads, args.kv_heads, args.ffn_width, args.n_vocab)
    assert (*shape, count_parameters(args)) == PUBLISHED[family, flavor]
    assert args.norm_eps == 1e-5
    assert args.rope_theta == (1e4 if family == "llama2" else 5e5)
    assert args.tied is (flavor in ("3.2-1B", "3.2-3B"))


def test_rope_scaling_belongs_to_3_1_and_3_2_only() -> None:
    for flavor, args in LLAMA3.flavors.items():
        factor = (
            8.0 if flavor.startswith("3.1") or flavor == "405B" else 32.0 if args.tied else None
        )
        assert args.rope_scaling == (factor and RopeScaling(factor, 1.0, 4.0, 8192)), flavor
    assert all(a.rope_scaling is None for a in LLAMA2.flavors.values())


def test_flops_per_token_of_published_logs() -> None:
    assert flops_per_token(resolve_args("llama3", "3.2-1B"), 8192) == 10_636_111_872
    mfu = 6785 * flops_per_token(resolve_args("llama3", "8B"), 8192) / 989e12
    assert f"{mfu:.2%}" == "39.73%"


def test_a_derived_width_follows_an_override() -> None:
    def width(**overrides: object) -> int:
        return resolve_args("llama3", "8B", overrides).ffn_width

    assert width() == 14336
    assert width(dim=2048) == 7168  # int(1.3 * 5461) = 7099, up to a multiple of 1024
    assert width(multiple_of=64) == 14208  # int(1.3 * 10922) = 14198
    assert width(ffn_dim_multiplier=1.0) == 11264
    assert width(dim=2048, ffn_dim=6000) == 6000
    assert resolve_args("llama3", "debugmodel", {"n_heads": 8}, tokenizer_size=512).kv_heads == 8


def test_rope_scaling_as_a_toml_file_may_say_it() -> None:
    full = {
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 8.0,
        "original_context": 1024,
    }
    assert RopeScaling.parse(full) == RopeScaling(4.0, 2.0, 8.0, 1024)
    section = Model(
        flavor="8B",
        rope_scaling=full,
        norm_type="fused_rmsnorm",
        vocab_size=64,
        overrides={"n_layers": 2},
    )
    args = model_args(section, 128)
    assert (args.rope_scaling, args.norm_type, args.n_vocab) == (
        RopeScaling.parse(full),
        "fused_rmsnorm",
        64,
    )
    assert (args.n_layers, args.max_seq_len) == (2, 128)
    assert RopeScaling.parse(4) == RopeScaling(4.0)
    assert RopeScaling.parse(1.0) is None
    assert RopeScaling.parse("none") is None
    assert resolve_args("llama3", "3.1-8B", {"rope_scaling": "none"}).rope_scaling is None


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ({"n_heads": 7}, "", "n_heads = 7 does not divide dim = 256"),
        ({"n_kv_heads": 3}, "", "n_kv_heads = 3 does not divide n_heads = 16"),
        ({"dim": 240}, "", "head_dim = 15 is no positive even number"),
        ({"n_layers": 0}, "", "n_layers must be positive, got 0"),
        ({"norm_type": "layernorm"}, "", "norm_type must be one of rmsnorm,"),
        ({"vocab_size": 511}, "", "512 entries but the model's vocabulary only 511"),
        ({"n_layers": 2.0}, "overrides.n_layers", "an integer, got 2.0"),
        ({"tied": 1}, "overrides.tied", "true or false, got 1"),
        ({"rope_theta": "1e4"}, "overrides.rope_theta", 'a number, got "1e4"'),
        ({"n_layer": 4}, "overrides.n_layer", "nearest: n_layers"),
        (
            {"max_seq_len": 16},
            "overrides.max_seq_len",
            "is 16, shorter than the sequences of 64 tokens",
        ),
    ],
)
def test_numbers_that_make_no_decoder_are_refused(
    overrides: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(ShapeError) as error:
        resolve_args("llama3", "debugmodel", overrides, tokenizer_size=512, max_seq_len=64)
    (problem,) = error.value.problems
    assert problem.key == field
    assert words in str(error.value)


def test_the_vocabulary_is_the_flavors_own_or_the_tokenizers() -> None:
    assert resolve_args("llama3", "debugmodel", tokenizer_size=2048).n_vocab == 2048
    assert resolve_args("llama3", "8B", tokenizer_size=2048).n_vocab == 128256
    assert resolve_args("llama3", "8B", vocab_size=2048, tokenizer_size=2048).n_vocab == 2048
    with pytest.raises(ValueError, match="128256 entries but the model's vocabulary only 32000"):
        resolve_args("llama2", "7B", tokenizer_size=128256)
    with pytest.raises(ValueError, match="takes its vocabulary from the tokenizer"):
        count_parameters(resolve_args("llama3", "debugmodel"))

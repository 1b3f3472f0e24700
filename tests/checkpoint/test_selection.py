"""Which tensors are loaded, and the table of those that do not fit."""

from __future__ import annotations

import pytest

from titanlite.checkpoint.manifest import CheckpointError
from titanlite.checkpoint.selection import select

Tensors = dict[str, list[object]]


def _model(layers: int, vocab: int = 192, ffn: int = 64, dtype: str = "float32", optimizer: bool = False) -> Tensors:
    weights: Tensors = {
        "model.tok_embeddings.weight": [dtype, [vocab, 64]],
        "model.output.weight": [dtype, [vocab, 64]],
    }
    for n in range(layers):
        weights[f"model.layers.{n}.wq.weight"] = [dtype, [64, 64]]
        weights[f"model.layers.{n}.w1.weight"] = [dtype, [ffn, 64]]
    if optimizer:
        for name in list(weights):
            parameter = name.removeprefix("model.")
            weights[f"optimizer.state.{parameter}.exp_avg"] = weights[name]
            weights[f"optimizer.state.{parameter}.step"] = ["float32", []]
    return weights


def _refusal(*args: object, **kwargs: object) -> str:
    with pytest.raises(CheckpointError) as error:
        select(*args, **kwargs)  # type: ignore[arg-type]
    return str(error.value)


def test_what_fits_is_loaded_whole() -> None:
    found = select(_model(2, optimizer=True), _model(2, optimizer=True))
    assert found.load == _model(2, optimizer=True).keys() and not found.keep and not found.converted


def test_the_table_names_each_kind_of_difference() -> None:
    there = {**_model(1, vocab=200), "model.rope": ["float32", [8]]}
    here = {**_model(2), "model.layers.0.wq.weight": ["int64", [64, 64]]}
    lines = _refusal(there, here, source="a/step-3").splitlines()
    assert lines[0] == "a/step-3 does not fit this model: 2 missing, 1 unexpected, 2 another shape, 1 another dtype"
    assert [line.split() for line in lines[1:-1]] == [
        ["tensor", "there", "here", "problem"],
        ["model.layers.0.wq.weight", "float32[64,", "64]", "int64[64,", "64]", "another", "dtype"],
        ["model.layers.1.w1.weight", "–", "float32[64,", "64]", "missing"],
        ["model.layers.1.wq.weight", "–", "float32[64,", "64]", "missing"],
        ["model.output.weight", "float32[200,", "64]", "float32[192,", "64]", "another", "shape"],
        ["model.rope", "float32[8]", "–", "unexpected"],
        ["model.tok_embeddings.weight", "float32[200,", "64]", "float32[192,", "64]", "another", "shape"],
    ]
    columns = [line.index(word) for line, word in zip(lines[1:3], ("problem", "another dtype"), strict=True)]
    assert columns[0] == columns[1]


def test_the_table_is_one_screen_in_the_order_of_layers() -> None:
    text = _refusal(_model(0), _model(30), source="x")
    lines = text.splitlines()
    assert len(lines) <= 24 and "60 missing" in lines[0] and "… and 40 more" in text
    names = [line.split()[0] for line in lines[2:22]]
    assert names.index("model.layers.2.w1.weight") < names.index("model.layers.9.wq.weight")
    assert not any(".layers.10." in name for name in names)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (_model(1, optimizer=True), _model(3, optimizer=True)),  # missing blocks
        (_model(3, optimizer=True), _model(1, optimizer=True)),  # unexpected ones
        (_model(9, ffn=96, optimizer=True), _model(9, optimizer=True)),  # one tensor of each block
        (_model(2, vocab=200, optimizer=True), _model(2, optimizer=True)),
        (_model(1, vocab=200, optimizer=True), _model(2, optimizer=True)),
        (_model(2), _model(2, optimizer=True)),  # weights only
    ],
)
def test_what_the_table_offers_is_accepted_and_takes_no_more(there: Tensors, here: Tensors) -> None:
    offered = _refusal(there, here).splitlines()[-1]
    keys: dict[str, list[str]] = {"allow_missing": [], "exclude_from_loading": []}
    for key, patterns in keys.items():
        if f"checkpoint.{key} = [" in offered:
            written = offered.split(f"checkpoint.{key} = [")[1].split("]")[0]
            patterns += [pattern.strip('" ') for pattern in written.split(",")]
    found = select(there, here, keys["exclude_from_loading"], keys["allow_missing"])
    alike = {name for name in here if there.get(name) == here[name]}
    # The optimizer's state of a weight that is not loaded is not loaded either, of its step for example.
    left = {name for name in alike - found.load}
    assert all(name.startswith("optimizer.state.") and name.endswith(".step") for name in left)
    assert found.load <= alike and found.load


def test_groups_and_patterns_leave_out_what_they_name() -> None:
    both = _model(2, optimizer=True)
    assert select(both, _model(2), ["optimizer"]).load == _model(2).keys()
    found = select(both, both, ["model.layers.1.*"])
    assert found.keep == {name for name in both if ".layers.1." in name}, "and their state of the optimizer"
    assert select(both, both, ["optimizer.*.exp_avg"]).keep == {n for n in both if n.endswith("exp_avg")}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    both = _model(1)
    assert "exclude_from_loading: 'optimiser' matches no tensor" in _refusal(both, both, ["optimiser"])
    assert "It takes model, optimizer, lr_scheduler" in _refusal(both, both, ["optimiser"])
    assert "allow_missing: 'model.norms' matches no tensor" in _refusal(both, both, [], ["model.norms"])
    assert "leaves nothing" in _refusal(both, both, ["model.*"])


def test_allowed_to_be_missing_is_not_left_out_when_it_is_there() -> None:
    both = _model(2)
    assert select(both, both, [], ["model.layers.1.*"]).load == both.keys()
    assert select(_model(1), both, [], ["model.layers.1.*"]).load == _model(1).keys()


def test_floating_types_are_converted_only_on_request() -> None:
    there, here = _model(1, dtype="bfloat16"), _model(1)
    assert "another dtype" in _refusal(there, here)
    assert select(there, here, convert=True).converted == here.keys()
    numbers = {name: ["int64", shape] for name, (_, shape) in there.items()}
    assert "another dtype" in _refusal(numbers, here, convert=True)

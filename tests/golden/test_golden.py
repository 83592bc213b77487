"""The running code against the golden numbers: nothing may get worse. See __init__.py for what each file holds."""

import copy
import os

import pytest

from ..one_architecture import try_architecture
from . import golden, measure
from .make import HEADS
from .verdicts import CASES, compare

# Attached models take whole rows, too, once the cut is at the decoder's entrance: then this is True, and later the only way.
WHOLE_ROWS = True
WAYS = ["sharded", pytest.param("whole", marks=pytest.mark.skipif(not WHOLE_ROWS, reason="the batch is cut before the model"))]
ALL = bool(os.environ.get("HF_ULYSSES_TEST_ALL"))

# -- verdicts of the sweep --------------------------------------------------------------------------------------------


def test_the_golden_sweep_is_the_one_of_the_first_stage():
    record = golden("sweep")
    counts = {
        (size, case): sum(by_size[size][case] == "exact" for by_size in record.values())
        for size in ("sp2", "sp4")
        for case in CASES
    }
    assert len(record) == 282
    assert list(counts.values()) == [245, 226, 243, 244, 225, 242]
    kinds = [by_size["kind"] for by_size in record.values()]
    assert {kind: kinds.count(kind) for kind in KINDS_FOUND} == KINDS_FOUND


KINDS_FOUND = {"exchange": 167, "inside": 63, "whole": 15, None: 37}

# One of each kind, of each verdict, and one with a module around its layers.
# (Attention that calls no interface, as bloom's, runs on the whole row by now.)
LIVE = ["llama", "gemma2", "qwen3_next", "roberta", "xlnet"]


@pytest.mark.parametrize("model_type", LIVE)
def test_the_verdict_of_today(ranks, model_type):
    for found in ranks(2).run(try_architecture, model_type, *HEADS[2]):
        assert compare(golden("sweep"), {model_type: {"sp2": found}}) == []


def exactly(*gathered, split=()):
    return {"status": "exact", "gathered": list(gathered), "split": list(split)}


def results_of(**cases):
    return {"sp2": {**dict.fromkeys(CASES, exactly()), **cases}}


GOLDEN = {
    "attends": {"kind": "exchange", "inside": [], "whole": [], "sp2": dict.fromkeys(CASES, "exact")},
    "scans": {"kind": "inside", "inside": ["mixer"], "whole": [], "sp2": {**dict.fromkeys(CASES, "exact"), "packed": "impossible"}},
    "counts": {"kind": "whole", "inside": [], "whole": ["embeddings"], "sp2": dict.fromkeys(CASES, "exact")},
    "mixes": {"kind": None, "inside": [], "whole": [], "sp2": dict.fromkeys(CASES, "refused")},
}  # fmt: skip


@pytest.mark.parametrize(
    "name, found, regressions",
    [
        ("attends", results_of(packed={"status": "refused", "why": "no"}), ["attends, sp2 packed: exact -> refused no"]),
        ("attends", results_of(packed={"status": "impossible"}), ["attends, sp2 packed: exact -> impossible"]),
        ("attends", results_of(packed={"status": "wrong"}), ["attends, sp2 packed: exact -> wrong"]),
        ("attends", {"sp2": {"model": {"status": "impossible"}}},
         [f"attends, sp2 {case}: exact -> impossible" for case in CASES]),
        ("attends", {"sp2": {"unpacked": exactly(), "packed": exactly()}}, ["attends, sp2 left_padded: exact -> missing"]),
        ("attends", results_of(packed=exactly(split=["model.layers.1.mlp"])), ["attends: exchange -> inside"]),
        ("attends", results_of(packed=exactly("model.layers.1.mlp")),
         ["attends: exchange -> whole", "attends: mlp runs on the whole row"]),
        ("scans", results_of(packed={"status": "error", "why": "x"}), ["scans, sp2 packed: impossible -> error x"]),
        ("scans", results_of(unpacked=exactly("layers.0.mixer")),
         ["scans: inside -> whole", "scans: mixer runs on the whole row"]),
        ("counts", results_of(unpacked=exactly("bert.embeddings", "layers.0.mlp")), ["counts: mlp runs on the whole row"]),
        ("mixes", results_of(unpacked={"status": "wrong"}), ["mixes, sp2 unpacked: refused -> wrong"]),
        ("new", results_of(unpacked={"status": "wrong"}), ["new, sp2 unpacked: not tried -> wrong"]),
    ],
)  # fmt: skip
def test_planted_regressions_are_found(name, found, regressions):
    assert compare(GOLDEN, {name: found}) == regressions


@pytest.mark.parametrize(
    "name, found",
    [
        ("attends", results_of()),
        ("scans", results_of(unpacked=exactly(split=["layers.0.mixer"]), packed={"status": "impossible"})),
        ("scans", results_of(unpacked=exactly("model around its layers"))),
        ("scans", results_of()),  # Packed rows and the exchange alone: better.
        ("counts", results_of(unpacked=exactly("bert.embeddings"))),
        ("mixes", results_of(unpacked=exactly("layers.0.mixer"), packed={"status": "refused"})),
        ("new", results_of(packed={"status": "refused"})),
    ],
)
def test_what_is_as_before_or_better_is_no_regression(name, found):
    assert compare(GOLDEN, {name: found}) == []


def test_a_complete_sweep_tries_every_model_and_size():
    tried = {name: results_of() for name in GOLDEN if name != "scans"}
    tried["counts"] = {"sp4": tried["counts"]["sp2"]}
    assert compare(GOLDEN, tried) == []
    assert compare(GOLDEN, tried, complete=True) == ["scans, sp2: not tried", "counts, sp2: not tried"]


# -- peaks of live storage --------------------------------------------------------------------------------------------


def assert_not_above(found, wanted):
    for rank, (now, then) in enumerate(zip(found, wanted, strict=True)):
        for step in then:
            assert 0 < now[step] <= 1.01 * then[step], f"{step} on rank {rank}: {now[step]} bytes, were {then[step]}"


@pytest.mark.parametrize("way", WAYS)
def test_peaks_of_an_attached_model(ranks, way):
    assert_not_above(ranks(2).run(measure.peaks, way), golden("peaks")["attach"])


def test_peaks_of_the_trainer(ranks):
    assert_not_above(ranks(2).run(measure.trainer_peaks), golden("peaks")["trainer"])


def test_the_logits_of_the_whole_row_would_be_noticed():
    """What one float32 copy of them on a rank adds, beside what is tolerated."""
    logits = measure.LENGTH * measure.VOCAB * 4
    for rank in [*golden("peaks")["attach"], *golden("peaks")["trainer"]]:
        assert logits // 2 > 20 * 0.01 * max(rank.values())


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", measure.LAYOUTS)
def test_collectives(ranks, name, way):
    """In a layer and in backward exactly those; around the layers one more in forward at most, of a few numbers."""
    size, *layout = measure.LAYOUTS[name]
    for now, then in zip(ranks(size).run(measure.collectives, *layout, way), golden("collectives")[name], strict=True):
        assert now["layer"] == then["layer"]
        # The loss of a sharded batch may be weighted by who uses it: one number goes back over the group.
        weighted = {"allreduce_": 1, "bytes of buffers": 4} if way == "sharded" else {}
        assert now["around"]["backward"] == {**then["around"]["backward"], **weighted}
        now, then = now["around"]["forward"], then["around"]["forward"]
        assert calls(now) <= calls(then) + 1, now
        assert now["bytes of buffers"] <= then["bytes of buffers"] + 1024, now


def calls(counts):
    return sum(count for name, count in counts.items() if not name.startswith("bytes"))


# -- trajectories -----------------------------------------------------------------------------------------------------

# float32 sums in another order: 1e-7 per step, growing over 8 steps to about 1e-6; a wrong weight shows at 1e-3.
RELATIVE = 1e-5

RUNS = measure.runs()
DEFAULT = ["trainer ddp sp2 accumulation1", "sft zero3 sp2 accumulation4", "sft zero3 sp2 packed", "trainer fsdp2 sp2 evaluated"]


@pytest.mark.parametrize("name", RUNS if ALL else DEFAULT)
def test_trajectory(ranks, name):
    settings, _ = RUNS[name]
    for found in ranks(settings["sp"] * settings.get("dp", 1)).run(measure.trajectory, settings):
        assert_same(found, golden("trajectories")[name])


def test_trajectory_of_one_process(ranks):
    """Where this one differs, the stack or the machine does, not sequence parallelism."""
    _, settings = RUNS["trainer ddp sp2 accumulation1"]
    assert_same(ranks(1).run(measure.trajectory, settings)[0], golden("trajectories")["one process"])


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert (found["engine"], found["exchanged"]) == (wanted["engine"], wanted["exchanged"])
    for name in wanted.keys() - {"engine", "exchanged", "parameters"}:
        assert found[name] == pytest.approx(wanted[name], rel=RELATIVE), name
    found, wanted = found["parameters"], wanted["parameters"]
    assert found["norm"] == pytest.approx(wanted["norm"], rel=RELATIVE)
    # A sum of numbers of either sign: measured against the norm.
    assert found["sum"] == pytest.approx(wanted["sum"], abs=RELATIVE * wanted["norm"])


def test_a_step_with_another_weight_is_noticed():
    wanted = golden("trajectories")["trainer ddp sp2 accumulation1"]
    for name in ("loss", "grad_norm"):
        spoiled = copy.deepcopy(wanted)
        spoiled[name][3] *= 1 + 1e-4
        with pytest.raises(AssertionError, match=name):
            assert_same(spoiled, wanted)

"""The pictures, as PNG: memory over the row's length (plan), two trainings (verify), throughput and memory (bench)."""

from contextlib import contextmanager

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COMPONENTS = ("parameters", "gradients", "optimizer", "communication", "allowance", "logits", "activations")


@contextmanager
def _figure(path, title, *shape, **options):
    figure, axes = pyplot.subplots(*shape, layout="constrained", **options)
    figure.suptitle(title)
    yield axes
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def memory_over_length(planner, setup, path, progress=lambda _: None) -> None:
    """By component, up to a fourth beyond the setup's own length, with the GPU's memory as a line."""
    unit = 64 * setup.step.sp_size
    lengths = [max(unit, int(setup.step.length * part) // unit * unit) for part in (0.05, 0.25, 0.5, 0.75, 1.0, 1.25)]
    plans = []
    for length in lengths:
        plans.append(planner.plan(setup.with_step(length=length)))
        progress(length)
    with _figure(path, f"{setup.engine}, {setup.num_gpus} GPUs, sp_size {setup.step.sp_size}", figsize=(9, 5)) as axis:
        axis.stackplot(lengths, [[plan.breakdown[name] for plan in plans] for name in COMPONENTS], labels=COMPONENTS)
        axis.axhline(setup.gpu_memory_gib, color="black", linestyle="--", label=f"{setup.gpu_memory_gib:g} GiB")
        axis.set(xlabel="tokens of a row", ylabel="GiB per GPU")
        handles, labels = axis.get_legend_handles_labels()
        axis.legend(handles[::-1], labels[::-1], loc="upper left")


def two_trainings(result, wording, path) -> None:
    """Loss and gradient norm of both runs above their relative difference; `result` of compare.py."""
    steps = [step["step"] for step in result["steps"]]
    with _figure(path, wording.title, 2, 2, figsize=(11, 6.5), sharex=True, height_ratios=[3, 2]) as axes:
        for (curve, difference), key in zip(axes.T, ("loss", "grad_norm"), strict=True):
            values = {name: [step[key][name] for step in result["steps"]] for name in result["steps"][0][key]}
            curve.plot(steps, values["plain"], color="tab:blue", linewidth=4, alpha=0.4, label=wording.plain)
            curve.plot(steps, values["sharded"], color="tab:red", linewidth=1.2, label=wording.sharded)
            curve.set_title(key)
            curve.legend()
            visible = [max(value, 1e-9) for value in values["relative_difference"]]  # a logarithmic axis has no 0
            difference.semilogy(steps, visible, ".-", color="tab:gray")
            allowed = f"allowed: {wording.tolerance:.0e}"
            difference.axhline(wording.tolerance, color="tab:red", linestyle="--", linewidth=1, label=allowed)
            difference.set(ylabel="relative difference", xlabel="optimizer step")
            difference.legend()


def throughput(rows, path) -> None:
    """Tokens per second and peak memory over row lengths, a line per sp size; `rows` of bench.py."""
    with _figure(path, "Throughput and peak memory", 1, 2, figsize=(11, 4.5)) as axes:
        for axis, key, title in zip(axes, ("tokens_per_second", "peak_gib"), ("tokens/s", "peak memory of rank 0, GiB")):
            for sp in sorted({row["sp_size"] for row in rows}):
                own = [row for row in rows if row["sp_size"] == sp and row["status"] == "ok"]
                axis.plot([row["length"] for row in own], [row[key] for row in own], "o-", label=f"sp {sp}")
            axis.set_xscale("log", base=2)
            axis.set(title=title, xlabel="tokens of a row")
            axis.legend()

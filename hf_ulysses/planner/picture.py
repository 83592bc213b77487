"""Memory by component over the length of the row, as PNG."""

from dataclasses import replace

COMPONENTS = ("parameters", "gradients", "optimizer", "communication", "allowance", "logits", "activations")


def draw(planner, setup, longest, path, tell=lambda _: None) -> None:
    """Up to a fourth beyond `longest` tokens, with the GPU's memory as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    unit = 64 * setup.step.sp_size
    lengths = [max(unit, int(longest * part) // unit * unit) for part in (0.05, 0.25, 0.5, 0.75, 1.0, 1.25)]
    plans = []
    for length in lengths:
        plans.append(planner.plan(replace(setup, step=replace(setup.step, length=length))))
        tell(length)
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    axis.stackplot(lengths, [[plan.breakdown[name] for plan in plans] for name in COMPONENTS], labels=COMPONENTS)
    axis.axhline(setup.gpu_memory_gib, color="black", linestyle="--", label=f"{setup.gpu_memory_gib:g} GiB")
    axis.set(xlabel="tokens of a row", ylabel="GiB per GPU", title=f"{setup.engine}, {setup.num_gpus} GPUs, sp_size {setup.step.sp_size}")
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], labels[::-1], loc="upper left")
    figure.savefig(path, dpi=120)
    plt.close(figure)

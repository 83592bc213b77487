"""Two trainings step by step: loss and gradient norm, a verdict, a table. `verify` and the quickstart use it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wording:
    """What the two runs are called, and how far apart they may be (relative)."""

    plain: str
    sharded: str
    tolerance: float
    title: str = ""


def compare(plain: list[dict], sharded: list[dict], tolerance: float, required_fall: float | None = None) -> dict:
    """Compares loss and grad_norm of every step; `required_fall`: by what part the loss has to fall, too."""
    steps = []
    for reference, value in zip(plain, sharded, strict=True):
        step = {"step": reference["step"]}
        for key in ("loss", "grad_norm"):
            step[key] = {
                "plain": reference[key],
                "sharded": value[key],
                "relative_difference": abs(value[key] - reference[key]) / max(abs(reference[key]), 1e-12),
            }
        steps.append(step)
    # Each step sees other rows, so the ends of the curve are averaged.
    ends = max(1, len(steps) // 8)
    first = sum(step["loss"]["sharded"] for step in steps[:ends]) / ends
    last = sum(step["loss"]["sharded"] for step in steps[-ends:]) / ends
    differences = {key: [step[key]["relative_difference"] for step in steps] for key in ("loss", "grad_norm")}
    largest, fall = {key: max(values) for key, values in differences.items()}, 1 - last / first
    # Not `max(...) > tolerance`: a NaN must fail.
    passed = bool(steps) and all(value <= tolerance for values in differences.values() for value in values)
    return {
        "passed": passed and (required_fall is None or fall >= required_fall),
        "largest_relative_difference": largest,
        "mean_relative_difference": {key: sum(values) / len(values) for key, values in differences.items()},
        "tolerance": tolerance,
        "fall_of_loss": fall,
        "required_fall_of_loss": required_fall,
        "steps": steps,
    }


def show(result: dict, wording: Wording, console) -> None:
    from rich.table import Table

    table = Table(title=wording.title)
    for column in ("step", "loss", wording.sharded, "difference", "grad_norm", wording.sharded, "difference"):
        table.add_column(column, justify="right")
    for step in result["steps"]:
        cells = [str(step["step"])]
        for key in ("loss", "grad_norm"):
            values = step[key]
            difference = values["relative_difference"]
            style = "green" if difference <= wording.tolerance else "bold red"
            cells += [f"{values['plain']:.6f}", f"{values['sharded']:.6f}", f"[{style}]{difference:.1e}[/{style}]"]
        table.add_row(*cells)
    console.print(table)
    largest, mean = result["largest_relative_difference"], result["mean_relative_difference"]
    verdict = "[bold green]PASSED[/bold green]" if result["passed"] else "[bold red]FAILED[/bold red]"
    required = result["required_fall_of_loss"]
    fall = f"; the loss fell by {result['fall_of_loss']:.0%}" + (f" (required {required:.0%})" if required is not None else "")
    console.print(
        f"{verdict}  largest relative difference: loss {largest['loss']:.1e}, grad_norm {largest['grad_norm']:.1e} "
        f"(allowed {wording.tolerance:.0e}); mean: loss {mean['loss']:.1e}, grad_norm {mean['grad_norm']:.1e}{fall}"
    )

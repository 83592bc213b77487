"""A progress bar with a readable line per logging step; the same numbers as JSON lines in output_dir/log.jsonl."""

import json
import warnings
from pathlib import Path

from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ProgressCallback


def use_training_log(trainer: Trainer) -> None:
    quiet_warnings()
    trainer.add_callback(JsonLog())
    if not trainer.args.disable_tqdm:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(ReadableProgress())


class JsonLog(TrainerCallback):
    """Writes every log of the first rank to output_dir/log.jsonl; a resumed run goes on in the same file."""

    def __init__(self):
        self.file: Path | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.file = Path(args.output_dir) / "log.jsonl"
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.open("a" if state.global_step else "w").close()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.file is not None:
            with self.file.open("a") as file:
                print(json.dumps({"step": state.global_step, "max_steps": state.max_steps, **logs}), file=file)


class ReadableProgress(ProgressCallback):
    """The Trainer's own progress bar, but with the logs as a line instead of as a Python dict."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            numbers = {key: value for key, value in logs.items() if key != "total_flos"}
            self.training_bar.write(log_line(state.global_step, state.max_steps, numbers))


def log_line(step: int, max_steps: int, numbers: dict[str, float]) -> str:
    return f"step {step}/{max_steps}  " + "  ".join(f"{key} {float(value):.5g}" for key, value in numbers.items())


def quiet_warnings() -> None:
    # DeepSpeed <= 0.19.8 calls collectives by names that torch 2.13 deprecates: a warning per call and rank.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)

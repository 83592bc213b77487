"""One architecture on every rank of a pool: loss and every gradient of a sharded step against the same step in one process.

Used by scripts/sweep_architectures.py for all of them and by tests/upstream/test_architectures.py for a few.
"""

import inspect
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import hf_ulysses

from .image_batches import ROWS, image_batch, image_config
from .tiny_models import LENGTH, tiny_config, tiny_model

CASES = ("unpacked", "packed", "left_padded")
IMAGE_CASES = tuple(ROWS)
# Refuse to train without being told that a token is text.
REQUIRES_TYPES = ("molmo2",)
# float32: a right implementation shows about 1e-6.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-4, 2e-3


def try_architecture(model_type, heads, kv_heads, cases=CASES, changes=None) -> dict:
    """Results by case: `status` (exact, wrong, refused, error, impossible), `why`, errors and counts. Collective."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        config = tiny_config(model_type, heads, kv_heads)
        for name, value in (changes or {}).items():
            setattr(config, name, value)
        model = tiny_model(config)
    except Exception as error:
        return {"model": {"status": "impossible", "why": _last_line(error)}}
    return try_model(model, cases)


def try_images(model_type, heads, kv_heads, cases=IMAGE_CASES) -> dict:
    """As `try_architecture`, with the model's tower and batches of images. Collective."""
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        model = tiny_model(image_config(model_type, heads, kv_heads), images=True)
        batches = {case: image_batch(model, ROWS[case], "left" if "left" in case else None) for case in cases}
    except Exception as error:
        return {case: {"status": "untried", "why": _last_line(error)} for case in cases}
    return try_batches(model, batches)


def try_model(model, cases=CASES) -> dict:
    return try_batches(model, {case: _batch(model, case) for case in cases})


def try_batches(model, batches, trial=True) -> dict:
    results = {"class": type(model).__name__}
    references = {case: _reference(model, batch) for case, batch in batches.items()}
    try:
        sp = hf_ulysses.attach(model, trial=trial)
    except Exception as error:
        return {**results, **{case: _failure(error) for case in batches}}
    with sp:
        for case, batch in batches.items():
            reference = references[case]
            possible = reference["status"] == "possible"
            results[case] = _compare(model, sp, batch, reference) if possible else reference
    return results


def _batch(model, case):
    """Full rows; `None` where the model has no such input."""
    generator = torch.Generator().manual_seed(1)
    size = 1 if case == "packed" else 2
    ids = torch.randint(3, 99, (size, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, 3:20:2] = -100
    if case == "packed":
        if "position_ids" not in inspect.signature(type(model).forward).parameters:
            return None
        batch["position_ids"] = torch.cat([torch.arange(n) for n in (13, 9, 23)])[None]
    if case == "left_padded":
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        pad = getattr(model.config.get_text_config(), "pad_token_id", None) or 0
        batch["input_ids"] = ids.where(mask.bool(), torch.tensor(pad))
        batch["labels"] = batch["labels"].where(mask.bool(), torch.tensor(-100))
        batch["attention_mask"] = mask
    if model.config.model_type in REQUIRES_TYPES:
        batch["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
    if hasattr(model, "lm_heads") and hasattr(model, "num_codebooks"):
        # Audio codes: a row of tokens, and of labels, for each codebook.
        batch["input_ids"] = batch["input_ids"].repeat_interleave(model.num_codebooks, dim=0)
        batch["labels"] = batch["labels"][..., None].repeat(1, 1, model.num_codebooks)
    return batch


def _reference(model, batch):
    """Loss and gradients of one process, or why it cannot do this."""
    if batch is None:
        return {"status": "impossible", "why": "takes no position_ids"}
    try:
        model.zero_grad()
        loss, logits = _loss(model, batch)
        loss.backward()
    except Exception as error:
        return {"status": "impossible", "why": _last_line(error)}
    if not torch.isfinite(loss):
        return {"status": "impossible", "why": f"the loss of one process is {float(loss)}"}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"status": "possible", "loss": float(loss.detach()), "logits": logits.detach(), "gradients": gradients}


def _compare(model, sp, batch, reference):
    model.zero_grad()
    before, scans = sp.exchanges, sp.scans
    try:
        loss, logits = _loss(model, batch)
        loss.backward()
    except Exception as error:
        return _failure(error)
    error = abs(float(loss.detach()) - reference["loss"]) / abs(reference["loss"])
    logits = _worst_logit(logits.detach(), reference["logits"], batch)
    gradient, worst = _worst_gradient(model, reference["gradients"])
    return {
        "status": "exact" if max(error, logits) < LOSS_TOLERANCE and gradient < GRADIENT_TOLERANCE else "wrong",
        "loss": error,
        "logits": logits,
        "gradient": gradient,
        "worst": worst,
        "exchanges": sp.exchanges - before,
        "gathered": sorted(sp.gathered),
        "scans": sp.scans - scans,
        "split": ["scans"] if sp.scans > scans else [],
    }


def _failure(error):
    return {"status": "refused" if _ours(error) else "error", "why": _last_line(error)}


def _loss(model, batch):
    out = model(**batch)
    loss = out.loss if hasattr(out, "loss") else out[0]
    if loss is None:
        raise RuntimeError(f"{type(model).__name__} computes no loss from labels")
    return loss, out["logits"] if isinstance(out, dict) else out[1]


def _worst_logit(logits, reference, batch):
    """The largest difference relative to the largest logit; nobody reads those of padding."""
    if logits.shape != reference.shape:
        return float("inf")
    difference = (logits - reference).abs()
    if torch.is_tensor(mask := batch.get("attention_mask")) and mask.shape == difference.shape[:2]:
        difference = difference[mask == 1]
    return float(difference.max() / reference.abs().max())


def _worst_gradient(model, reference):
    """The largest difference of a parameter's gradient, relative to its norm, and the parameter's name."""
    total = torch.sqrt(sum(grad.square().sum() for grad in reference.values()))
    worst, where = 0.0, ""
    for name, parameter in model.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
        expected = reference.get(name, torch.zeros_like(grad))
        # Gradients that are zero in theory (a bias on the keys) are noise: measured against the whole gradient.
        error = float((grad - expected).norm() / expected.norm().clamp(min=1e-4 * total))
        error = float("inf") if error != error else error
        if error > worst:
            worst, where = error, name
    return worst, where


def _ours(error):
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError) and Path(hf_ulysses.__file__).parent in Path(last.filename).parents


def _last_line(error):
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" + ("" if _ours(error) else f" ({Path(last.filename).name}:{last.lineno})")

"""Does it fit: an engine's states, one measured step, and a stated allowance; and the longest row that does.

The allowance is not measured and not fitted: 1 GiB for the CUDA context, cuBLAS's workspaces and NCCL's buffers, and 2 % of
what a step allocates for what the caching allocator cannot use (blocks are rounded, and `expandable_segments`, which the
launch path sets, grow by 2 MiB). On the host, 2 GiB for each process.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product

from ..memory import Settings
from .states import ENGINES, sizes_of, states_of
from .step import Step, build, layers_of, measure

GIB = 2**30
CONTEXT_GIB, FRAGMENTATION, PROCESS_GIB = 1.0, 0.02, 2.0


@dataclass(frozen=True)
class Setup:
    """Machines, engine and step. `step.length` and `step.sp_size` are the row's; memory in GiB.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    num_gpus: int
    step: Step
    gpu_memory_gib: float = 80.0
    engine: str = "zero3"
    offload_optimizer: bool = False
    offload_params: bool = False
    gpus_per_node: int = 8
    host_memory_gib: float | None = None

    def __post_init__(self):
        if self.engine not in ENGINES:
            raise ValueError(f"The engine must be one of {', '.join(ENGINES)}, not {self.engine!r}.")
        if min(self.num_gpus, self.step.sp_size) < 1 or self.num_gpus % self.step.sp_size:
            valid = [n for n in range(1, self.num_gpus + 1) if self.num_gpus % n == 0]
            raise ValueError(f"sp_size={self.step.sp_size} does not divide {self.num_gpus} GPUs. Choose it from {valid}.")
        if self.engine in ("ddp", "zero0") and (self.offload_optimizer or self.offload_params):
            raise ValueError(f"{self.engine} cannot offload: choose zero2, zero3 or fsdp2.")
        if self.offload_params and self.engine not in ("zero3", "fsdp2"):
            raise ValueError(f"{self.engine} cannot offload parameters: choose zero3 or fsdp2.")

    def with_step(self, **changes) -> "Setup":
        return replace(self, step=replace(self.step, **changes))


@dataclass(frozen=True)
class Plan:
    """The answer, in GiB: per GPU, `host_memory_gib` per node."""

    setup: Setup
    peak_memory_gib: float
    fits: bool
    host_memory_gib: float
    breakdown: dict
    all_to_all_gib_per_step: float
    flops_per_step_per_gpu: float
    max_seq_length: int | None = None
    notes: list = field(default_factory=list)

    def document(self) -> dict:
        """For `--json`."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        setup = asdict(own.pop("setup"))
        step, limit = setup.pop("step"), setup.pop("host_memory_gib")
        return {**own, "seq_length": step.pop("length"), "host_memory_limit_gib": limit, **setup, **step}


class Planner:
    """Plans for one model. Measurements are kept: engines and offloading share them.

    Args:
        config (`transformers.PretrainedConfig`): of a causal language model; left as it is.
    """

    def __init__(self, config):
        self.config = config
        self._built, self._measured = {}, {}

    def plan(self, setup: Setup) -> Plan:
        # DDP computes in bfloat16 from float32 weights by autocast; DeepSpeed and FSDP2 cast the weights.
        step = replace(setup.step, autocast=setup.engine == "ddp" and setup.step.dtype == "float32")
        if setup.engine == "fsdp2" and step.dtype == "float32":
            step = replace(step, dtype="bfloat16")
        kind = replace(step, length=0, sp_size=1, batch=1, memory=Settings())
        if kind not in self._built:
            self._built[kind] = build(self.config, step)
        model, fake = self._built[kind]
        if step not in self._measured:
            self._measured[step] = measure(model, fake, step)
        width = 4 if step.dtype == "float32" else 2
        reference = step.trainer == "dpo" and not step.lora_rank
        offload = setup.offload_optimizer, setup.offload_params
        states = states_of(setup.engine, sizes_of(model, layers_of(model)[2]), setup.num_gpus, width, *offload, reference)
        return self._sum(setup, self._measured[step], states)

    def _sum(self, setup, measured, states):
        running = measured.peak * (1 + FRAGMENTATION) + states.gathered
        per_node = min(setup.num_gpus, setup.gpus_per_node)
        breakdown = {
            "parameters": states.parameters,
            "gradients": states.gradients,
            # What its step needs where activations leave less room.
            "optimizer": states.optimizer + max(0, states.step - running),
            "activations": measured.peak - measured.logits,
            "logits": measured.logits,
            "communication": states.kept + states.gathered,
            "allowance": CONTEXT_GIB * GIB + FRAGMENTATION * measured.peak,
        }
        breakdown = {name: size / GIB for name, size in breakdown.items()}
        total, host = sum(breakdown.values()), per_node * ((states.host + measured.host) / GIB + PROCESS_GIB)
        fits = total <= setup.gpu_memory_gib and (setup.host_memory_gib is None or host <= setup.host_memory_gib)
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        notes = []
        if limit and setup.step.length > limit:
            notes.append(f"The model was made for {limit:,} positions: rows of {setup.step.length:,} need other rotary frequencies.")
        return Plan(setup, total, fits, host, breakdown, measured.sent / GIB, measured.flops, None, notes)

    def longest(self, setup: Setup, progress=lambda _: None) -> Plan:
        """The plan of the longest row that fits, to 1 %, or of a short one if none does. `progress(length)` after each plan."""
        unit = setup.step.sp_size * 64
        shortest = unit * (16 + setup.step.images * (setup.step.image_tokens + 1) // unit)

        def at(length):
            length = int(length) // unit * unit
            plan = self.plan(setup.with_step(length=length))
            progress(length)
            room = 1 - plan.peak_memory_gib / setup.gpu_memory_gib
            return length, room if setup.host_memory_gib is None else min(room, 1 - plan.host_memory_gib / setup.host_memory_gib), plan

        low, room, best = at(shortest)
        if room < 0:
            return replace(best, max_seq_length=0)
        high, tries = None, 0
        while high is None or high - low > max(unit, 0.01 * low):
            # Memory is nearly a straight line; where it is not, halves end the search.
            guess = 16 * low if high is None else low + (high - low) * (room / (room - beyond) if tries < 8 else 0.5)
            guess, left, plan = at(guess if high is None else min(max(guess, low + unit, 1.008 * low), high - unit))
            if left >= 0:
                low, room, best = guess, left, plan
            else:
                high, beyond = guess, left
            tries += high is not None
        return replace(best, max_seq_length=low)

    def sp_sizes(self, num_gpus) -> list:
        """Those that divide the GPUs and give every rank equally many query heads."""
        heads = getattr(self.config.get_text_config(), "num_attention_heads", num_gpus)
        return [n for n in range(1, num_gpus + 1) if num_gpus % n == 0 and heads % n == 0]

    def recommend(self, setup: Setup, sp_size=None, engine=None, progress=lambda _: None) -> Plan:
        """The first plan that fits, cheapest first: without offloading, without memory switches, few ranks per row."""
        memories = dict.fromkeys([setup.step.memory, Settings(memory="max") if setup.step.checkpointing else setup.step.memory])
        offloads = dict.fromkeys([setup.offload_optimizer, engine not in ("ddp", "zero0")])
        sizes = [sp_size] if sp_size else self.sp_sizes(setup.num_gpus)
        least = None
        for offload, memory, size, name in product(offloads, memories, sizes, [engine] if engine else ["zero2", "zero3"]):
            plan = self.plan(replace(setup, engine=name, offload_optimizer=offload).with_step(sp_size=size, memory=memory))
            progress(setup.step.length)
            if plan.fits:
                return plan
            least = min(least or plan, plan, key=lambda plan: plan.peak_memory_gib)
        return least

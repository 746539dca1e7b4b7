"""Whether a plan fits into the memory of a rank, and what to lower where it does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import Whole
from leaderless.planner.checks.capabilities import check_packable
from leaderless.planner.engines import backend_of
from leaderless.planner.layout import all_ranks
from leaderless.planner.make_plan import longest_part
from leaderless.planner.memory.estimate import estimate_memory
from leaderless.planner.memory.layers import packed_bytes
from leaderless.planner.memory.limits import PAGE_TOKENS, CacheBound
from leaderless.planner.memory.model import FLOAT32_BYTES
from leaderless.planner.memory.offload import is_only_scored
from leaderless.planner.memory.rank import COMMANDS, LARGE_MAX_LOGITS, DeviceMemory, Room, format_bytes
from leaderless.planner.plan import Plan

MARGIN = 0.85
"""Share of a rank's memory that an estimate may fill: it is right to about 15 %."""
LARGEST_POOL = 1 << 24
"""Most tokens of an engine's pool, where there is not room for all sequences at their longest."""


@dataclass(frozen=True)
class Fit:
    """How a plan fits into the memory of a rank.

    Attributes:
        pass_tokens: Most tokens of one pass to begin with.
        problem: Reason why it does not fit, or only just, and settings to lower; empty if there is room.
        is_hopeless: Whether not even passes of one sample and one sequence at a time would fit.
        room: Use of the memory that is left.
    """

    pass_tokens: int
    problem: str = ""
    is_hopeless: bool = False
    room: Room = field(default_factory=Room)


def fit_plan(
    recipe: Recipe, plan: Plan, available: int, *, is_cpu: bool, has_pages: bool = True, per_machine: int = 1
) -> Fit:
    """Compare the estimate of a plan with what there is.

    With `batch.micro_batch_tokens: auto`, the bound of a pass is halved until the estimate fits. On accelerators the
    pools of native engines are bounded until it does, for sequences may wait for each other. What is left then goes
    into large chunks of logits, into what ranks keep whole, and into what engines keep while they sleep. A plan with a
    model of unknown size is taken to fit. `available` are the bytes that each rank may use: on a CPU, an equal part of
    what the `per_machine` ranks of a machine have together, of which one may take more if others need less. Without
    pages, as on accelerators other than CUDA's, keys and values are not bounded.
    """
    tokens = plan.batch.micro_batch_tokens
    longest = longest_part(recipe, plan.instances)
    limit = MARGIN * available

    def memory(
        pass_tokens: int, sequences: int | None = None, room: Room | None = None, among: Sequence[int] | None = None
    ) -> DeviceMemory:
        estimate = estimate_memory(recipe, plan, pass_tokens, sequences, among, room)
        assert estimate is not None, "checked before"
        return estimate.cpu if is_cpu else estimate.accelerator

    def share(pass_tokens: int, sequences: int | None = None, room: Room | None = None) -> int:
        """Bytes for the fullest rank, if all ranks of its machine have what they have in proportion to their needs."""
        peaks = [[memory(pass_tokens, sequences, room, (rank,)).peak for rank in ranks] for ranks in machines]
        fullest = max((peak for some in peaks for peak in some), default=0)
        return min((available * len(some) * fullest // sum(some) for some in peaks), default=available)

    if plan.memory is None:
        return Fit(tokens)
    machines = _uneven_machines(plan, per_machine) if is_cpu else []
    unbound, is_bounded = CacheBound(has_pages=has_pages), has_pages and not is_cpu
    least_room = Room(cache=CacheBound(PAGE_TOKENS) if is_bounded else unbound)
    while plan.batch.adapts_to_memory and tokens > longest:
        if memory(tokens, room=least_room).peak <= MARGIN * share(tokens, room=least_room):
            break
        tokens = max(tokens // 2, longest)

    def fits(room: Room, most: float = limit) -> bool:
        return memory(tokens, room=room).peak <= most

    # Where something else is too large, a run may be tried all the same, and pools should not make it worse.
    least_peak = max(limit, memory(tokens, room=least_room).peak)
    bounds = [unbound, *(CacheBound(size) for size in _sizes(LARGEST_POOL, PAGE_TOKENS) if is_bounded)]
    room = next(room for room in (Room(cache=bound) for bound in bounds) if fits(room, least_peak))
    least, expected = memory(longest, 1, Room(cache=unbound)), memory(tokens, room=room)
    if least.peak > (there := share(longest, 1, Room(cache=unbound))):
        return Fit(tokens, _shortage(recipe, plan, least, None, there), is_hopeless=True, room=room)
    if expected.peak > MARGIN * (there := share(tokens, room=room)):
        return Fit(tokens, _shortage(recipe, plan, expected, tokens, there), room=room)
    # On the CPU ranks share the memory through which they send, and under another plan there may be less room.
    if is_cpu or recipe.schedule.replan_every_steps:
        return Fit(tokens, room=room)
    large = replace(room, max_logits=LARGE_MAX_LOGITS)
    room = large if fits(large) else room
    kinds: tuple[Whole, ...] = ("all", "weights")
    room = next(filter(fits, (replace(room, keeps=kind) for kind in kinds)), room)
    staying = replace(room, cache=room.cache._replace(stays=is_bounded))
    return Fit(tokens, room=staying if fits(staying) else room)


def _uneven_machines(plan: Plan, per_machine: int) -> list[list[int]]:
    """Ranks of each machine, where they may need unequal parts of its memory; none where all ranks need the same."""
    layouts = [instance.layout for instance in plan.instances]
    ranks = all_ranks(*layouts)
    if per_machine == 1 or all(len(layout.ranks) == len(ranks) and layout.pp == 1 for layout in layouts):
        return []
    machines = dict[int, list[int]]()
    for rank in ranks:
        machines.setdefault(rank // per_machine, []).append(rank)
    return list(machines.values())


def _sizes(largest: int, smallest: int) -> Iterator[int]:
    """A number, three quarters of it, a half, and so on."""
    while largest >= smallest:
        yield from (size for size in (largest, largest * 3 // 4) if size >= smallest)
        largest //= 2


def _shortage(recipe: Recipe, plan: Plan, memory: DeviceMemory, tokens: int | None, available: int) -> str:
    totals, how = memory.totals, "at least" if tokens is None else "about"
    phase = max((name for name in totals if name not in COMMANDS), key=totals.__getitem__)
    held = {**memory.resident, **memory.phases[phase]} if phase in memory.phases else memory.apart[phase]
    largest = sorted(held.items(), key=lambda part: -part[1])[:5]
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
    return (
        f"a rank needs {how} {format_bytes(memory.peak)} in its fullest phase, '{phase}' ({parts}), and there are "
        f"{format_bytes(available)} for it: {_remedies(recipe, plan, memory, tokens)}"
    )


def _remedies(recipe: Recipe, plan: Plan, memory: DeviceMemory, tokens: int | None) -> str:
    """Settings to lower, first those without an effect on numbers."""
    remedies, is_text = list[str](), recipe.body is None
    phase = max(memory.phases, key=memory.totals.__getitem__)
    role, _, does = phase.rpartition(" ")
    if does in {"trains", "scores"} and (kept := recipe.as_seen_by(role).training.keep_whole) in {"weights", "all"}:
        remedies.append(f"leave out {recipe.key_of('training.keep_whole', role)}={kept}")
    if tokens is not None:
        if does == "generates" and is_text:
            setting = recipe.key_of("rollout.max_sequences", role)
            remedies.append(f"lower {setting}={recipe.as_seen_by(role).rollout.max_sequences}")
        elif does == "judges":
            remedies.append(f"lower {_most_asked(recipe, role)}")
        else:
            remedies.append(f"lower batch.micro_batch_tokens={tokens}")
    if not is_text:
        remedies.append(f"lower batch.prompts_per_step={recipe.batch.prompts_per_step}, whose episodes are kept")
    if "checkpoint copy" in memory.resident:
        saved = format_bytes(memory.resident["checkpoint copy"])
        remedies.append(f"set checkpoint.asynchronous=false, which saves {saved}")
    remedies += _offloads(recipe, plan, memory, phase)
    trained = [instance.role for instance in plan.instances if instance.is_trained]
    unchecked = [role for role in trained if (m := recipe.model_of(role)) and not m.gradient_checkpointing]
    if unchecked and phase.endswith(" trains"):
        remedies.append(f"set models.{unchecked[0]}.gradient_checkpointing")
    whole = [role for role in trained if (m := recipe.model_of(role)) and m.lora is None]
    if whole and is_text and phase.endswith(" trains"):
        remedies.append(f"train adapters: set models.{whole[0]}.lora")
    remedies += _packed(recipe, plan, trained) if is_text else ()
    is_cpu = not memory.host
    remedies.append(f"use {'ranks of more machines' if is_cpu else 'more ranks'}, or a smaller model")
    return "; ".join(remedies)


def _packed(recipe: Recipe, plan: Plan, trained: Sequence[str]) -> Iterator[str]:
    """The setting that gives the weights below adapters 4 bits, and what it saves, where they can have them."""
    for role in trained:
        model, size = recipe.model_of(role), plan.sizes.get(role)
        if model is None or size is None or model.lora is None or model.lora.packed_block:
            continue
        lora = model.lora.model_copy(update={"base_dtype": "nf4"})
        try:
            for instance in plan.instances:
                if instance.role == role:
                    check_packable(lora, f"models.{role}", instance, recipe.as_seen_by(role), size)
        except RecipeError:
            continue
        layout = next(one.layout for one in plan.instances if one.role == role and one.is_trained)
        shards = backend_of(recipe.as_seen_by(role).training.backend).num_shards(layout)
        count = sum(one.inputs * one.outputs for one in size.linears)
        saved = (count * FLOAT32_BYTES - packed_bytes(count, lora.packed_block)) // shards
        yield f"set models.{role}.lora.base_dtype=nf4, which saves {format_bytes(saved)} of weights"
        return


def _offloads(recipe: Recipe, plan: Plan, memory: DeviceMemory, phase: str) -> Iterator[str]:
    """Settings that keep something elsewhere while it is not used, each with the bytes that it saves."""
    place = "host" if memory.host else "disk"
    for instance in plan.instances:
        role, seen = instance.role, recipe.as_seen_by(instance.role)
        follows = len(backend_of(seen.training.backend).optimizers) > 1
        kept = memory.resident.get(f"{role} optimizer", 0)
        if instance.is_trained and follows and kept:
            yield f"set {recipe.key_of('optimizer.offload', role)}={place}, which saves {format_bytes(kept)}"
        held = memory.resident.get(f"{role} weights", 0)
        if held and not phase.startswith(f"{role} ") and is_only_scored(recipe, plan.instances, instance):
            yield f"set {recipe.key_of('training.offload_frozen', role)}={place}, which saves {format_bytes(held)}"
        config = recipe.model_of(role)
        if phase == f"{role} trains" and config is not None and config.gradient_checkpointing and follows:
            changed = recipe.model_copy(
                update={"models": {**recipe.models, role: config.model_copy(update={"offload_activations": True})}}
            )
            before, after = (estimate_memory(one, plan, plan.batch.micro_batch_tokens) for one in (recipe, changed))
            assert before is not None
            assert after is not None
            one, other = (found.accelerator if memory.host else found.cpu for found in (before, after))
            if (saved := one.totals[phase] - other.totals[phase]) > 0:
                yield f"set models.{role}.offload_activations, which saves {format_bytes(saved)}"


def _most_asked(recipe: Recipe, role: str) -> str:
    """The setting that bounds how many questions the engine of a judge answers at a time, with its value."""
    judges = {name: recipe.reward.judges()[name] for name, own in recipe.reward.roles().items() if own == role}
    name, options = max(judges.items(), key=lambda judge: judge[1].max_requests)
    sequences = recipe.as_seen_by(role).rollout.max_sequences
    if sequences < options.max_requests:
        return f"{recipe.key_of('rollout.max_sequences', role)}={sequences}"
    return f"reward.{name}.max_requests={options.max_requests}"

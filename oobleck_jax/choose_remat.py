"""The choice of `--remat auto`: the policy with the fastest step of those whose plan fits memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from oobleck_jax.config import Remat, ScheduleKind
from oobleck_jax.elastic.terms import Proposal
from oobleck_jax.errors import PlanError
from oobleck_jax.planning.forecast import forecast_plan
from oobleck_jax.planning.profile import Profile
from oobleck_jax.propose import Proposer


_POLICIES = (Remat.NONE, Remat.DOTS, Remat.LAYER, Remat.STAGE)  # the later, the less is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    """What one policy amounts to."""

    proposer: Proposer
    step_s: float
    memory_bytes: int  # of the device that needs the most
    why_not: str  # empty: it fits

    def __str__(self) -> str:
        policy = self.proposer.config.remat
        return f"{policy}: {self.why_not}" if self.why_not else f"{policy}: {self.step_s:.3g} s"


def choose_remat(proposer: Proposer, profile_of: Callable[[Remat], Profile]) -> tuple[Proposer, str]:
    """Return the proposer with the chosen policy, and the reason.

    Args:
        proposer: of a run with `Remat.AUTO`.
        profile_of: costs with a policy; not asked for `Remat.STAGE`, which costs as much as `Remat.LAYER` by layer.

    Raises:
        PlanError, NotEnoughNodes: no policy fits; what the one says that keeps the least.
    """
    trials: list[_Trial] = []
    policies = _POLICIES if proposer.config.schedule is not ScheduleKind.ZB_H1 else (Remat.NONE,)
    for policy in policies:
        profile = replace(trials[-1].proposer.profile, remat=policy) if policy is Remat.STAGE else profile_of(policy)
        config = replace(proposer.config, remat=policy)
        trials.append(_try(replace(proposer, config=config, profile=profile)))
    fitting = [trial for trial in trials if not trial.why_not]
    if not fitting:
        trials[-1].proposer.first()  # raises
        raise PlanError(f"--plan does not fit with any --remat ({'; '.join(map(str, trials))}); cut it otherwise")
    best = min(reversed(fitting), key=lambda trial: trial.step_s)  # of equally fast ones, that which keeps less
    others = "; ".join(str(trial) for trial in trials if trial is not best)
    room = f"{best.memory_bytes / 2**30:.3g} of {proposer.device_memory_bytes / 2**30:.3g} GiB"
    return best.proposer, (
        f"--remat auto takes {best.proposer.config.remat}, the fastest that fits: {best.step_s:.3g} s per step and "
        f"{room} predicted ({others})"
    )


def _try(proposer: Proposer) -> _Trial:
    try:
        proposal: Proposal = proposer.first()
    except PlanError as error:
        why_not = str(error).partition(";")[0]
        return _Trial(proposer=proposer, step_s=0.0, memory_bytes=0, why_not=why_not)
    templates = proposer.templates
    forecast = forecast_plan(proposal.plan, proposer.profile, templates.costs)
    memory_bytes = max(stage.memory_bytes for stages in forecast.stages for stage in stages)
    why_not = ""
    if memory_bytes > proposer.device_memory_bytes:  # of a plan that the user gave
        why_not = f"needs {memory_bytes / 2**30:.3g} GiB of a device"
    return _Trial(proposer=proposer, step_s=forecast.step_s, memory_bytes=memory_bytes, why_not=why_not)

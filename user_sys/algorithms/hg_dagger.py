"""HG-DAgger: imitation of a person who takes over when the policy errs, after Kelly, Sidrane, Driggs-Campbell and
Kochenderfer, "HG-DAgger: Interactive Imitation Learning with Human Experts", ICRA 2019 (arXiv 1810.02890), algorithm 1.

While the robot acts, the data set D grows by the steps in which a person had control, and behaviour cloning
(`user_sys.algorithms.bc`) goes on:

    D       <- D + {(s, a) : a person acted}
    L(phi)   = mean over D of -log pi_phi(a|s), or of the flow-matching loss

The steps of the policy itself are not imitated. Corrections are rare, and show what the policy lacks. So each batch has
a fixed share of them, as in intervention weighted regression (Mandlekar et al. 2020, arXiv 2012.06733, section IV-C):
`intervention_share`. The paper's estimate of the policy's doubt is left out: people decide when they take over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from user_sys.algorithms.algorithm import TrainingData
from user_sys.algorithms.bc import Bc, BcSettings, ImitatedSteps
from user_sys.errors import ConfigError
from user_sys.replay.selectors import INTERVENTION_PHASES, ROLES, MixturePart, PhaseName


@dataclass(frozen=True)
class HgDaggerSettings(BcSettings):
    """The settings of HG-DAgger: those of behaviour cloning, and:

    Attributes:
        steps: which steps are imitated besides those in which a person took over.
        intervention_share: share of each batch from steps in which a person took over.
        phases: of these steps; RaC (Hu et al. 2025, arXiv 2509.07953) also imitates recovery.
    """

    steps: tuple[ImitatedSteps, ...] = ("demonstrations",)
    intervention_share: float = 0.5
    phases: tuple[PhaseName, ...] = INTERVENTION_PHASES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.intervention_share < 1:
            raise ConfigError(f"intervention_share is {self.intervention_share}; set it between 0 and 1, both excluded")
        if not self.phases or "policy" in self.phases:
            raise ConfigError(f"phases is {list(self.phases)}; list some of teleop, correction, recovery")
        if "interventions" in self.steps:
            raise ConfigError("steps names interventions; intervention_share gives their share: remove it from steps")


class HgDagger(Bc):
    """See the module. It trains the policies that `Bc` trains."""

    settings = HgDaggerSettings
    _settings: HgDaggerSettings

    @property
    def data(self) -> TrainingData:
        """See `Algorithm.data`."""
        data, phases = super().data, self._settings.phases
        shares = (*data.mixture_settings, "intervention_share")
        return replace(data, mixture_settings=shares, interventions=phases, phases=(*data.phases, *phases))

    def mixture(self) -> tuple[MixturePart, ...]:
        """See `TrainingData.mixture`."""
        share = self._settings.intervention_share
        taken_over = replace(ROLES["interventions"], phases=self._settings.phases)
        others = tuple(ROLES[each] for each in self._settings.steps)
        return (MixturePart(others, 1 - share), MixturePart((taken_over,), share))

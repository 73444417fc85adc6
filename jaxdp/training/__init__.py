"""Training loop: runs a plan on data and returns the plan's output point."""

from jaxdp.training.budgets import Budget as Budget
from jaxdp.training.budgets import Reservation as Reservation
from jaxdp.training.diagnosis import Diagnosis as Diagnosis
from jaxdp.training.diagnosis import diagnose as diagnose
from jaxdp.training.fitting import fit as fit
from jaxdp.training.fitting import resume as resume
from jaxdp.training.loop import Callback as Callback
from jaxdp.training.loop import CallbackInfo as CallbackInfo
from jaxdp.training.loop import Carry as Carry
from jaxdp.training.loop import FitInfo as FitInfo
from jaxdp.training.loop import FitResult as FitResult
from jaxdp.training.loop import make_program as make_program
from jaxdp.training.loop import start as start
from jaxdp.training.replaying import Replay as Replay
from jaxdp.training.replaying import replay as replay
from jaxdp.training.reporting import report as report
from jaxdp.training.stopping import Stopped as Stopped
from jaxdp.training.stopping import StopSignal as StopSignal
from jaxdp.training.stopping import stop_on_signal as stop_on_signal
from jaxdp.training.studies import StudyResult as StudyResult
from jaxdp.training.studies import study as study

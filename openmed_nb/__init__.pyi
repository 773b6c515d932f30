from IPython.core.interactiveshell import InteractiveShell

from . import compat as compat
from . import errors as errors
from . import runbook as runbook
from . import training as training
from ._annotate import annotate as annotate
from .annotation.export.registry import read_annotations as read_annotations
from .annotation.loading import load_model as load_model
from .annotation.loading import load_pipeline as load_pipeline
from .distributed.starting import cluster as cluster
from .errors import OpenMedError as OpenMedError
from .errors import OpenMedWarning as OpenMedWarning
from .models.config import OpenMedConfig as OpenMedConfig
from .notebook.panel import panel as panel
from .runbook.bench.comparison import compare as compare
from .runbook.bench.sweep import sweep as sweep
from .runbook.checks.doctor import doctor as doctor
from .runbook.checks.doctor import system_status as system_status
from .runbook.records.gathering import logbook as logbook
from .runbook.records.handoff import handoff as handoff
from .runbook.records.report import report as report
from .runbook.verdict.verdict import verdict as verdict
from .session import device as device
from .session import explain_device as explain_device
from .session import list_devices as list_devices
from .session import reset as reset
from .session import simulated_mps as simulated_mps
from .session import use as use
from .training.epochs import epochs as epochs
from .training.guards import Guards as Guards
from .training.release import release as release

__version__: str

def load_ipython_extension(shell: InteractiveShell) -> None: ...
def unload_ipython_extension(shell: InteractiveShell) -> None: ...

"""The panel without its widgets: its operations and its state. All clicks are processed in the thread that runs the cells.

Since version 4.4, JupyterLab sends widget messages over a subshell of the kernel, whose handlers run in another thread
(setting ``commsOverSubshells``). Tensor operations in two threads can crash the process on MPS (reported up to torch 2.14: pytorch#197805). The modes
of torch, which the simulated MPS uses, are local to one thread. Therefore a click is passed to the event loop of the main
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from traitlets import HasTraits, Instance

from ..._annotate import annotate_in_session
from ..._events.activity import ProgressEvent
from ..._render.display import Report
from ..._utils.text import short_type_name
from ...errors import OpenMedError
from ...session import SESSION, Session
from ...training.release import release
from .state import PanelState, StateChanges, read_state

if TYPE_CHECKING:
    from IPython.core.events import EventManager
    from IPython.core.interactiveshell import InteractiveShell

# Maximum delay of text that was typed before a click and is still being delivered in another thread of the kernel.
PENDING_INPUT_SECONDS = 0.1


class MainThreadRunner:
    """Runs functions in the main thread, which runs the cells, through its event loop.

    Without an event loop, functions run immediately in the thread of the caller.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        if loop is None:
            with contextlib.suppress(RuntimeError):  # asyncio has no other check for a running loop.
                self.loop = asyncio.get_running_loop()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller may run a function immediately: in the main thread, or without an event loop."""
        return self.loop is None or threading.current_thread() is threading.main_thread()

    def run(self, function: Callable[[], None]) -> None:
        """Run a function in the main thread: immediately if it is the current thread, otherwise between cells."""
        if self.is_current_thread:
            function()
        else:
            self.call_soon(function)

    def call_soon(self, function: Callable[[], None], wait: float = 0.0) -> None:
        """Schedule a function in the event loop of the main thread, after a delay in seconds.

        Without an event loop, run it immediately.
        """
        if self.loop is None:
            function()
        elif wait:
            self.loop.call_soon_threadsafe(self.loop.call_later, wait, _run_interruptibly, function)
        else:
            self.loop.call_soon_threadsafe(_run_interruptibly, function)


def kernel_loop(shell: InteractiveShell) -> asyncio.AbstractEventLoop | None:
    """Return the event loop of the kernel of a shell, or ``None`` if it has none."""
    loop = getattr(getattr(shell.kernel, "io_loop", None), "asyncio_loop", None)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def _run_interruptibly(function: Callable[[], None]) -> None:
    """Run a function so that an interrupt of the kernel stops it.

    A kernel ignores interrupts while it does not process a message (ipykernel's ``init_signal``).
    """
    if threading.current_thread() is not threading.main_thread():
        function()  # Python allows signal handlers in the main thread only.
        return
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function()
    except KeyboardInterrupt:
        pass  # The function handles its interrupts. This one arrived later and would stop the event loop of the kernel.
    finally:
        signal.signal(signal.SIGINT, previous)


NO_TEXT = 'Enter some text, then click "Annotate".'


class PanelModel(HasTraits):
    """State and operations of a panel; the session makes all decisions.

    A view observes the trait ``state``, which may change in any thread that changes the session.
    """

    state: PanelState = Instance(PanelState)

    def __init__(
        self,
        session: Session = SESSION,
        model: str | None = None,
        show_text: bool = True,
        *,
        cells: MainThreadRunner | None = None,
        events: EventManager | None = None,
    ) -> None:
        super().__init__(state=PanelState(**read_state(session)))
        self.session = session
        self.cells = cells or MainThreadRunner()
        self._name = model
        self._show_text = show_text
        self._lock = threading.RLock()
        self._closed = False
        self._stop_listening = session.subscribe(self._on_event)
        self._events = events
        if events is not None:
            events.register("post_run_cell", self.on_cell_end)

    def use_device(self, device: str) -> None:
        """Override the device for the session, as ``%openmed_device`` does."""
        self._dispatch(
            ProgressEvent("Changing the device", device),
            lambda: _report_moved(self.session.use(device, "the panel").moved_models),
        )

    def reset(self) -> None:
        """Clear the device override, as ``%openmed_device --reset`` does."""
        self._dispatch(
            ProgressEvent("Changing the device", "reset"),
            lambda: _report_moved(self.session.reset().moved_models),
        )

    def refresh(self) -> None:
        """Read the state of the session again."""
        self._dispatch(ProgressEvent("Refreshing the panel", "device, environment, memory"), dict)

    def release(self) -> None:
        """Release memory, as ``%openmed_release`` does, of the session of this process, even if another is displayed."""
        self._dispatch(
            ProgressEvent("Releasing memory", "models, outputs, last error"),
            lambda: {"result": release().final_report()},
        )

    def annotate(self, text: str) -> None:
        """Annotate a text, which stays in this process."""
        texts = [text]
        del text  # Otherwise the frames of an error would keep it.
        self._dispatch(ProgressEvent("Annotating", self._name or "bundled"), lambda: self._annotate_text(texts.pop()))

    def annotate_deferred(self, read: Callable[[], str]) -> None:
        """Annotate a text that may arrive after the click, because a kernel can process the click first."""

        def annotate_now() -> None:
            self._count_pending(-1)
            self.annotate(read())

        self._count_pending(1)
        self.cells.call_soon(annotate_now, PENDING_INPUT_SECONDS)

    def on_cell_end(self, *_result: object) -> None:
        """Show the changes of a cell. IPython calls this after each cell."""
        self.cells.run(lambda: self._update(**self._read_state()))

    def close(self) -> None:
        """Disconnect the panel from the session and the cells. Closing a closed panel has no effect."""
        self._closed = True
        self._stop_listening()
        if self._events is not None:
            self._events.unregister("post_run_cell", self.on_cell_end)
        self._events = None
        self.unobserve_all()

    def _dispatch(self, event: ProgressEvent, operation: Callable[[], StateChanges]) -> None:
        """Run an operation in the main thread, and show that it is pending if it has to wait."""
        if self.cells.is_current_thread:
            self._run_operation(event, operation)
        else:
            self._count_pending(1)
            self.cells.call_soon(lambda: self._run_operation(event, operation, waited=1))

    def _count_pending(self, difference: int, **changes: Any) -> None:
        """Change the number of pending clicks and other fields in one state."""
        with self._lock:
            self._update(pending_clicks=self.state.pending_clicks + difference, **changes)

    def _run_operation(self, event: ProgressEvent, operation: Callable[[], StateChanges], waited: int = 0) -> None:
        """Run an operation of the session and show its result or error.

        One state both ends the wait and starts the activity. With two states the controls would flicker. The displayed
        error is a copy, because the frames and causes of the original keep tensors and the text alive.
        """
        if self._closed:  # The panel was closed while the click was pending.
            return
        changes: StateChanges = {}
        unexpected = ""
        remedy = (
            "To see the full error message, run the same action as a command in a cell. %openmed lists the commands."
        )
        try:
            self._count_pending(-waited, activity=event, error=None, result=None)
            with self.session.operation():  # It notifies all panels at its end, including this one.
                changes = operation()
        except OpenMedError as error:
            changes = {"error": type(error)(error.message, error.remedy)}
        except KeyboardInterrupt:
            message = f"{event.operation} was interrupted."
            again = "To try again, click the button again. If the panel does not respond, restart the kernel."
            changes = {"error": OpenMedError(message, again)}
        except Exception as error:  # noqa: BLE001 - an error without its text and frames is raised instead
            # The text could quote a note, and a kernel writes a raised error into the notebook.
            unexpected = f"{event.operation} failed with {short_type_name(error)}."
            changes = {"error": OpenMedError(unexpected, remedy)}
        finally:
            self._update(activity=None, **changes)
        if unexpected:
            raise OpenMedError(unexpected, remedy)  # A separate error, because the displayed one must not have frames.

    def _on_event(self, event: ProgressEvent | None) -> None:
        """Show the progress of any operation of the session, or its new state."""
        if event is None:
            self.cells.run(self._reload_state)
        else:
            self._update(activity=event)

    def _reload_state(self) -> None:
        """Show the current state of the session, and clear the error or result of a click if the device has changed."""
        changes = {"activity": None, **self._read_state()}
        if changes.get("devices", self.state.devices).choice != self.state.choice:
            changes |= {"error": None, "result": None}
        self._update(**changes)

    def _read_state(self) -> StateChanges:
        """Return the state of the session, or no changes while another thread changes it, which notifies at its end."""
        return read_state(self.session) if self.session.is_idle() else {}

    def _update(self, **changes: Any) -> None:
        """Replace fields of the state, and clear an outdated annotation."""
        with self._lock:
            state = replace(self.state, **changes)
            self.state = replace(state, annotation=None) if state.is_annotation_outdated else state

    def _annotate_text(self, text: str) -> StateChanges:
        if isinstance(text, str) and not text.strip():
            return {"annotation": None, "result": Report(NO_TEXT)}
        options = {"model": self._name, "show_text": self._show_text}
        return {"annotation": annotate_in_session(self.session, text, options, {})}


def _report_moved(names: tuple[str, ...]) -> StateChanges:
    return {"result": Report(f"Moved to the new device: {', '.join(names)}.")} if names else {}

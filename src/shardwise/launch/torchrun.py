"""One node of a run under torchrun's elastic agent, which `shardwise launch` starts on each node.

The agents meet at an endpoint, start the processes of their nodes, and start all of them again
after one has died, after a node was lost, or when one comes to a run that goes on with fewer
(`launch.min_nodes`). Each start resumes from the last whole checkpoint. A signal to an agent makes
the run save first; an elastic one goes on without that node.
"""

import contextlib
import errno
import io
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from shardwise.base.process.ending import CODES, FAILED, OUT_OF_MEMORY, USER_ERROR, RunError
from shardwise.base.process.stop import SIGNALS
from shardwise.base.process.world import AT_RANK_0, STORE, listener, threads_each, variables
from shardwise.checkpoint import memory_folder
from shardwise.config import RunConfig, UserError, require
from shardwise.launch.manifest import name_of

# torch is imported inside functions: a user's mistake is reported before that takes its seconds.

_STOPPED = tuple(128 + number for number in SIGNALS)
"""Exit codes of ranks that were asked to stop, and have saved."""
DEFAULT_PORT = 29400
"""Where torchrun's agents meet if an endpoint names no port."""
_SIGNALS = ",".join(signal.Signals(number).name for number in SIGNALS)
_NEARLY = (
    "# launch runs the agent of this command itself, and reads the exit codes of ranks: it does "
    "not start a mistake again."
)
ENDED = psutil.STATUS_ZOMBIE
"""The status of a rank until its agent has read how it has ended."""
_WAY_OUT = "start this command again on every node: the run resumes from its last checkpoint"


def script(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> str:
    """Return the command of a node, for a shell: torchrun's, which is nearly what `run` does.

    UserError for options that torchrun does not have.
    """
    arguments, here = _arguments(cfg, run_file, overrides), _variables(cfg)
    with variables(here):  # else torchrun's own number of threads would stay in the environment
        # With an endpoint, as `run` gives one: else torchrun warns that it uses no master address.
        _parsed(["--rdzv-endpoint=here", *arguments] if cfg.launch.nodes == 1 else arguments)
    words = ["torchrun", *arguments]
    prefix = [f"{name}={shlex.quote(value)}" for name, value in here.items()]
    if cfg.launch.nodes == 1:
        prefix.append(f'{STORE}="$(mktemp -d)/store"')
    return f"{_NEARLY}\n" + " ".join([*prefix, shlex.join(words)]) + "\n"


def run(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> int:
    """Be the agent of a node until the run has ended; return the exit code of its ranks.

    UserError for options that torchrun does not have; RunError where the agents lose one another.
    """
    arguments, here = _arguments(cfg, run_file, overrides), _variables(cfg)
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        if cfg.launch.nodes == 1:
            here[STORE] = str(Path(folder, "store"))
            arguments = [f"--rdzv-endpoint={folder}/agents", *arguments]
        codes = Path(folder, "codes")
        codes.mkdir()
        here |= {"TORCHELASTIC_SIGNALS_TO_HANDLE": _SIGNALS, CODES: str(codes)}
        with variables(here):
            code = _run_agent(["--log-dir", folder, *arguments], codes)
    memory_folder.forget(cfg.training.output_dir)  # of a run that has failed for good
    return code


def _arguments(cfg: RunConfig, run_file: str, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of torchrun. What agents and ranks of one node say stays on loopback."""
    launch = cfg.launch
    options = {"rdzv-backend": "c10d", **launch.torchrun}
    if launch.nodes == 1:  # the agent keeps its notes in a file; ranks meet in another one
        options.pop("rdzv-endpoint", None)
        conf = options.get("rdzv-conf")
        options["rdzv-conf"] = f"store_type=file{',' if conf else ''}{conf or ''}"
    require(
        launch.nodes == 1 or isinstance(options.get("rdzv-endpoint"), str),
        f"launch.nodes is {launch.nodes}: say where the nodes meet, such as "
        "launch.torchrun={rdzv-endpoint: node1:29400} with the name of the first one",
    )
    fewest = "" if launch.min_nodes is None else f"{launch.min_nodes}:"
    options |= {
        "nnodes": f"{fewest}{launch.nodes}",
        "nproc-per-node": launch.processes,
        "max-restarts": launch.restarts_of_launch,
        "rdzv-id": name_of(cfg),
        # A step and a checkpoint may take so long after a signal.
        "shutdown-timeout": max(1, round(cfg.launch.timeout_seconds)),
        "signals-to-handle": _SIGNALS,
    }
    words = [
        f"--{key}" if value is None or value is True else f"--{key}={value}"
        for key, value in options.items()
    ]
    return [*words, "-m", "shardwise", "train", run_file, *overrides, "--resume", "auto"]


def _variables(cfg: RunConfig) -> dict[str, str]:
    return {
        # Else the ranks of a new start find dead addresses in the agents' store (pytorch 135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(threads_each(cfg.launch.processes)),
        **({AT_RANK_0: "1"} if cfg.launch.nodes > 1 else {}),
        **cfg.launch.environment,
    }


def _run_agent(arguments: Sequence[str], codes: Path) -> int:
    """Run torch's agent as torchrun does with these arguments, except for what `_Starts` changes.

    `codes`: the folder in which ranks leave their exit codes.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters, api

    config, program, words = _parsed(arguments)
    endpoint = config.rdzv_endpoint
    handler = None  # to shut it down ends the run of all nodes
    starts = None
    try:
        handler = _rendezvous(
            RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
        )
        assert config.shutdown_timeout is not None, "it is among the arguments"
        # Its ranks, which wait for the others as long, are to say first what is missing.
        _give_up_after(3 * config.shutdown_timeout // 2)
        spec = WorkerSpec(
            role=config.role,
            local_world_size=config.nproc_per_node,
            entrypoint=program,
            args=tuple(words),
            rdzv_handler=handler,
            max_restarts=sys.maxsize,  # `_Starts` counts
            monitor_interval=config.monitor_interval,
            local_addr=config.local_addr,
            event_log_handler=config.event_log_handler,
            numa_options=config.numa_options,
        )
        agent = LocalElasticAgent(
            spec,
            logs_specs=config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        starts = _Starts(handler, config, codes, agent.get_worker_group())
        result = agent.run()
        return exit_code(each.exitcode for each in result.failures.values()) if result else 0
    except _EndedError as error:
        if starts is not None and starts.is_elastic and error.code in (USER_ERROR, OUT_OF_MEMORY):
            handler = None  # what this node lacks, the others may have
        return error.code
    except ValueError as error:
        if handler is not None:
            raise
        raise _refused(error) from None
    except SignalException as error:
        handler = None
        return 128 + error.sigval
    except api.RendezvousTimeoutError:
        raise RunError(
            f"fewer than {config.min_nodes} nodes came to {endpoint} in time; {_WAY_OUT}"
        ) from None
    except api.RendezvousClosedError:
        raise RunError(
            f"the run has ended on the other nodes, which say how; if it failed, {_WAY_OUT}"
        ) from None
    except (api.RendezvousError, DistError) as error:
        # Ranks may have said why and ended, while their agent waited for an answer.
        ended = set() if starts is None else set(starts.codes())
        if ended & {FAILED, USER_ERROR, OUT_OF_MEMORY}:
            return exit_code(ended)
        reason = error.__cause__ or error
        raise RunError(
            f"the nodes cannot meet at {endpoint}: {reason}; was that node lost? {_WAY_OUT}"
        ) from None
    finally:
        if handler is not None:
            handler.shutdown()


def _parsed(arguments: Sequence[str]) -> tuple[Any, Any, list[str]]:
    """Return what torchrun makes of its arguments: the agent's settings, and the ranks' command.

    UserError where it refuses them.
    """
    from torch.distributed import run

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parsed = run.get_args_parser().parse_args(arguments)
        return run.config_from_args(parsed)
    except (SystemExit, ValueError) as error:
        is_parsers = isinstance(error, SystemExit)
        raise _refused(said.getvalue().splitlines()[-1] if is_parsers else error) from None


def _rendezvous(parameters: Any) -> Any:
    """Return where agents meet. A store at a host with one address listens there alone.

    torch's own listens on every interface, and unpickles what anyone writes there.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, utils
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    is_tcp = parameters.get("store_type", "tcp").strip().lower() == "tcp"
    if parameters.backend != "c10d" or not is_tcp:
        return _rendezvous_by_torch(parameters)
    host, port = utils.parse_rendezvous_endpoint(parameters.endpoint, DEFAULT_PORT)
    is_host, options = parameters.get_as_bool("is_host"), {}
    if is_host is not False:  # None: whoever has the address
        try:
            server = listener(host, port)
        except OSError as error:
            # A port that is taken is that of another agent of this node.
            is_elsewhere = error.errno == errno.EADDRNOTAVAIL
            if is_elsewhere and not is_host and host != socket.gethostname():
                return _rendezvous_by_torch(parameters)
            server = None
        else:
            is_elsewhere = server is None
        if is_elsewhere:
            note = (
                f"note: {host} is here no name of one address that other nodes reach; if this node "
                "is the meeting place of the agents, they meet on every interface of it. To listen "
                "on one alone, give its address as rdzv-endpoint in launch.torchrun"
            )
            print(note, file=sys.stderr, flush=True)
            return _rendezvous_by_torch(parameters)
        if server is not None:
            options["master_listen_fd"] = server.detach()
    store = TCPStore(
        *(host, port),
        is_master=bool(options),
        multi_tenant=True,
        timeout=timedelta(seconds=parameters.get_as_int("read_timeout", 60)),
        **options,
    )
    backend = c10d_rendezvous_backend.C10dRendezvousBackend(store, parameters.run_id)
    return create_handler(store, backend, parameters)


def _rendezvous_by_torch(parameters: Any) -> Any:
    """Return where agents meet as torch makes it, which looks for the addresses of this node's own
    name. Where that has none, as in some containers, this node is not the meeting place.
    """
    from torch.distributed.elastic.rendezvous import registry

    try:
        return registry.get_rendezvous_handler(parameters)
    except socket.gaierror:
        parameters.config["is_host"] = False
        return registry.get_rendezvous_handler(parameters)


def _give_up_after(seconds: int) -> None:
    """Let connections to the agents' store fail after so long without an answer.

    torch's store waits for some answers without a limit. Without this, and so outside of Linux, the
    agent of a node that is cut off for good waits for as long as the kernel sends again: a quarter
    of an hour.
    """
    if sys.platform != "linux":
        return
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # no socket, or one without a peer
            connection = socket.socket(fileno=number)
            try:
                connection.getpeername()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                probe = max(1, min(seconds // 2, 32767))  # the kernel takes no more
                for option, value in (
                    (socket.TCP_USER_TIMEOUT, 1000 * seconds),
                    (socket.TCP_KEEPIDLE, probe),
                    (socket.TCP_KEEPINTVL, probe),
                ):
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
            finally:
                connection.detach()  # the descriptor is torch's


def _refused(reason: object) -> UserError:
    return UserError(f"torchrun refuses launch.torchrun: {reason}; see its --help")


class _EndedError(Exception):
    """Ranks of this node have ended, and are not started again."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Starts:
    """Starts of this node's ranks, before each of which torch's agent asks where ranks meet.

    The agent starts ranks again whatever their exit codes say, of which each rank leaves its own.
    """

    def __init__(self, handler: Any, config: Any, codes: Path, ranks: Any) -> None:
        """Stand between the agent and its rendezvous `handler`; `ranks` leave codes in `codes`."""
        self._codes, self._num_ranks = codes, config.nproc_per_node
        self._ranks, self._seconds_to_save = ranks, config.shutdown_timeout
        self.is_elastic, self._num_left = config.min_nodes < config.max_nodes, config.max_restarts
        self._has_begun = self._others_come = False
        self._meet, self._num_waiting = handler.next_rendezvous, handler.num_nodes_waiting
        handler.next_rendezvous, handler.num_nodes_waiting = self._start, self._waiting

    def _waiting(self) -> int:
        """Return how many nodes wait to join: the agent starts all ranks again for them."""
        number = self._num_waiting()
        self._others_come = number > 0
        if self._others_come:
            self._tell()
            self._end_ranks()
        return number

    def _end_ranks(self) -> None:
        """Let the ranks save and end: the agent, which ends them next, gives them 30 seconds."""
        numbers = [rank.id for rank in self._ranks.workers]
        ranks = [process for process in psutil.Process().children() if process.pid in numbers]
        for rank in ranks:
            rank.terminate()
        last = time.monotonic() + self._seconds_to_save
        while time.monotonic() < last and any(each.status() != ENDED for each in ranks):
            time.sleep(0.1)

    def _start(self) -> Any:
        """Return where the ranks meet; raises _EndedError instead of starting them in vain."""
        if self._has_begun and not self._others_come:
            self._go_on(self.codes())
            self._tell()
        self._has_begun, self._others_come = True, False
        for path in self._codes.iterdir():
            path.unlink()
        return self._meet()

    def _tell(self) -> None:
        note = f"note: starting again; {self._num_left} restarts are left"
        print(note, file=sys.stderr, flush=True)

    def _go_on(self, codes: list[int]) -> None:
        killed = [-signal.SIGKILL] * (self._num_ranks - len(codes))  # these have left no code
        code = exit_code([*codes, *killed]) or FAILED
        is_stopped = code in _STOPPED
        if code in (USER_ERROR, OUT_OF_MEMORY) or (is_stopped and not self.is_elastic):
            raise _EndedError(code)  # it would end alike again, or is asked to end
        if not is_stopped:  # else another node leaves or comes: no failure
            if not self._num_left:
                raise _EndedError(code)
            self._num_left -= 1

    def codes(self) -> list[int]:
        """Return the exit codes of the ranks that have ended since the last start."""
        return [int(path.read_text()) for path in self._codes.iterdir()]


def exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of ranks that ended with these.

    Those that are left when one has ended get SIGTERM.
    """
    ended = set(codes) - {0}
    if cause := ended & {USER_ERROR, OUT_OF_MEMORY}:
        return min(cause)
    stopped = ended - {-signal.SIGTERM}
    if stopped and stopped <= set(_STOPPED):
        return min(stopped)
    return FAILED if ended else 0

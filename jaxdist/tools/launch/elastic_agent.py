"""Jobs that go on with the hosts and GPUs that are there, and grow when more come back.

The launchers of a job meet in the run directory (`rendezvous`) and go through it in rounds. The
lowest living rank leads: it waits for all hosts, or some seconds for those that come, chooses the
hosts and processes that make the largest legal mesh, and writes the round. Whom it chose starts
its processes; who is left out waits as a spare. A round ends when

    its processes have ended           0: the job is done; 75 or a failure: the next round
    a member is lost                   its counter stands still: the others end their processes
    more is possible than it uses      the leader asks it to save and end: the next round
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from jaxdist import runtime
from jaxdist.tools.launch.membership import Choice, ElasticPlan, Sizes, choose
from jaxdist.tools.launch.rendezvous import BEAT_S, Host, Rendezvous, Round
from jaxdist.tools.launch.resources import Capacity, capacity, first_gpus, free_port
from jaxdist.tools.launch.worker_group import Attempt, Outcome, Place

_POLL_S = 0.3


class ElasticPlaces:
    """Where the attempts of an elastic job run, seen from one of its hosts.

    Args:
        plan: what the job may be made of.
        meeting: this host's part in the rendezvous.
        sizes: what the program may be started with.
        tells_itself: a request to stop one process reaches all, as jaxdist.train's do.
        write: takes a line for the console.
    """

    def __init__(
        self,
        plan: ElasticPlan,
        meeting: Rendezvous,
        sizes: Sizes,
        *,
        tells_itself: bool,
        write: Callable[[str], None] | None = None,
    ):
        self.plan, self.meeting, self.sizes = plan, meeting, sizes
        self.round: Round | None = None  # that this host is in, or was in last
        self._tells_itself = tells_itself
        self._write_line = write or _print
        self._said = ""
        self._had_gpus = False
        self._read: Round | None = None  # round.json, and since when it is this round's
        self._read_since = 0.0
        self._idle_since: float | None = None  # nothing runs, and this host leads
        self._left_since: dict[int, float] = {}
        self._next_look = 0.0
        self._next_count = 0.0
        self._told = False

    # --- between rounds ---------------------------------------------------------------------------

    def next(self, stop_signal: Callable[[], int]) -> tuple[int, Place] | int:
        """Wait for a round with a place for this host; or the exit code with which all is over."""
        if not self.meeting.me.beat:
            rival = self.meeting.claim()
            if rival is not None:
                _refuse_rank(rival)
        self.wait()
        while not stop_signal():
            if self.meeting.clock() >= self._next_count:
                self._offer()
            found = self.poll()
            if isinstance(found, Round):
                return found.number, self.enter(found)
            if found is not None:
                return found
            time.sleep(_POLL_S)
        return (
            runtime.EXIT_INTERRUPTED if stop_signal() == signal.SIGINT else runtime.EXIT_PREEMPTED
        )

    def wait(self) -> None:
        """Offer this host, with what it has now, for the next round."""
        self._idle_since, self._said = None, ""
        self._offer()

    def poll(self) -> Round | int | None:
        """A round with a place for this host, the job's exit code, or nothing yet; leads if it can.

        Raises:
            ConfigError: another launcher has the same rank.
        """
        hosts = self.meeting.look()
        if self.meeting.rival is not None and self.round is None:
            _refuse_rank(self.meeting.rival)
        current = self._current_round()
        code = self._over(hosts, current)
        if code is not None:
            return code
        is_new = current is not None and (self.round is None or current.id != self.round.id)
        if current is not None and is_new and current.index_of(self.meeting.me.uuid) is not None:
            return current
        if self._leads(hosts):
            return self._lead(hosts, current)
        self._say_waiting(current, hosts)
        return None

    def enter(self, new: Round) -> Place:
        """Take this host's place in a round."""
        self.round, self._told, self._left_since = new, False, {}
        self._next_look = self.meeting.clock() + BEAT_S
        self.meeting.say(state="running", round=new.id)
        me = self.meeting.me
        index = new.index_of(me.uuid)
        assert index is not None  # poll gives out no other
        first = new.members[0]
        address = "127.0.0.1" if len(new.members) == 1 else first.address
        visible = ""
        if me.gpus and new.nproc_per_node * new.devices < me.devices:
            visible = first_gpus(new.nproc_per_node * new.devices)
        return Place(
            nproc_per_node=new.nproc_per_node,
            nnodes=len(new.members),
            node_rank=index,
            coordinator_address=f"{address}:{first.port}",
            num_hosts=len({host.address for host in new.members}),
            visible_gpus=visible,
        )

    # --- while a round runs -----------------------------------------------------------------------

    def watch(self, attempt: Attempt) -> None:
        """End the processes where a member is lost; pass a wish to stop on; lead."""
        now = self.meeting.clock()
        if now < self._next_look:
            return
        self._next_look = now + BEAT_S
        if attempt.is_stopping and not self._told and self.meeting.me.state == "running":
            self.meeting.say(state="leaving")
        if now >= self._next_count:
            self.meeting.say(self._count())
        hosts, current = self.meeting.look(), self._current_round()
        lost = self._loss(hosts, current, attempt.is_stopping)
        if lost:
            attempt.abandon(lost)
            return
        self._pass_on(attempt, hosts, current)
        if self._leads(hosts):
            self._lead(hosts, current)

    def ended(self, outcome: Outcome) -> None:
        """Tell the others how this host's processes ended."""
        if self.meeting.me.state == "running":
            ends = {runtime.EXIT_OK: "done", runtime.EXIT_PREEMPTED: "saved"}
            self.meeting.say(state=ends.get(outcome.exit_code, "failed"))

    def all_done(self, stop_signal: Callable[[], int]) -> bool:
        """Whether the processes of every member end with 0; waits for those that still run."""
        assert self.round is not None  # something has ended
        while not stop_signal():
            hosts = self.meeting.look()
            states = [self._state_in_round(hosts, host) for host in self.round.members]
            if all(state == "done" for state in states):
                break
            if not any(state == "running" for state in states):
                return False
            time.sleep(_POLL_S)
        return True

    def goes_on(self) -> bool:
        """Whether there will be another round after a save that nobody asked of this host."""
        assert self.round is not None  # something has ended
        current = self._current_round()
        ended = self.round if current is None else current
        return ended.id != self.round.id or bool(ended.stop) or len(ended.members) > 1

    def close(self, code: int, stop_signal: int) -> None:
        """Leave: for good with the job's exit code, or alone."""
        if not self.meeting.me.beat or self.meeting.rival is not None:
            self.meeting.fall_silent()
        elif code == runtime.EXIT_OK:
            self.meeting.close()
        elif stop_signal or code == runtime.EXIT_PREEMPTED:
            self.meeting.close(state="left")
        else:
            self.meeting.close(state="over", code=code)

    # --- leading ----------------------------------------------------------------------------------

    def _leads(self, hosts: Mapping[int, Host]) -> bool:
        ready = [h.rank for h in hosts.values() if h.state in ("waiting", "running")]
        living = [rank for rank in ready if self.meeting.is_living(hosts[rank])]
        return bool(living) and min(living) == self.meeting.me.rank

    def _lead(self, hosts: Mapping[int, Host], current: Round | None) -> int | None:
        """Write the next round when it is time, or the wish for one; an exit code to give up."""
        living = [h for h in hosts.values() if self.meeting.is_living(h)]
        if current is not None and self._runs(current, hosts):
            self._idle_since = None
            self._say_waiting(current, hosts)
            self._grow(current, [h for h in living if h.state in ("waiting", "running")])
            return None
        now = self.meeting.clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        waiting = [h for h in living if h.state == "waiting"]
        is_late = now >= self._idle_since + self.plan.rdzv_timeout_s
        choice = None
        if is_late or len(waiting) >= self.plan.nnodes.most:
            choice = choose(waiting, self.plan, self.sizes)
        if choice is not None:
            self._begin(choice, -1 if current is None else current.number)
        elif is_late:
            return self._give_up(waiting)
        else:
            self._say_waiting(None, hosts)
        return None

    def _begin(self, choice: Choice, last_number: int) -> None:
        new = Round(
            id=uuid.uuid4().hex,
            number=last_number + 1,
            members=choice.hosts,
            nproc_per_node=choice.nproc_per_node,
            devices=choice.devices,
        )
        self.meeting.write_round(new)
        missing = self.plan.nnodes.most - len(choice.hosts)
        short = f", {missing} short of {self.plan.nnodes.most}" if missing else ""
        self._say(
            f"round {new.number}: {', '.join(map(str, new.members))}{short}; processes on each: "
            f"{new.nproc_per_node}, devices in all: {new.num_devices}"
        )

    def _grow(self, current: Round, there: Sequence[Host]) -> None:
        choice = choose(there, self.plan, self.sizes)
        if current.stop or choice is None or choice.num_devices <= current.num_devices:
            return
        text = f"{choice.num_devices} devices can be used, round {current.number} has "
        stop = text + str(current.num_devices)
        self.meeting.write_round(dataclasses.replace(current, stop=stop))

    def _give_up(self, waiting: Sequence[Host]) -> int:
        there = ", ".join(f"{h} with {_devices(h.devices)}" for h in waiting)
        legal = "" if self.sizes.legal is None else f"; legal device counts: {self.sizes.legal}"
        self._say(
            f"after {self.plan.rdzv_timeout_s:g} s the hosts that are here cannot run a job of "
            f"--nnodes {self.plan.nnodes} × --nproc-per-node {self.plan.nproc_per_node}{legal}. "
            f"Here: {there}. Start the same command again when more hosts are back, or with a "
            "smaller MIN or mesh"
        )
        return runtime.EXIT_PREEMPTED

    # --- reading the others -----------------------------------------------------------------------

    def _current_round(self) -> Round | None:
        current = self.meeting.read_round()
        if current is None:  # it cannot be read now: nothing new
            return self._read
        if self._read is None or current.id != self._read.id:
            self._read_since = self.meeting.clock()
        self._read = current
        return current

    def _runs(self, current: Round, hosts: Mapping[int, Host]) -> bool:
        """Whether any member runs this round, or is about to."""
        return any(self._state_in(current, hosts, host) == "running" for host in current.members)

    def _state_in_round(self, hosts: Mapping[int, Host], member: Host) -> str:
        assert self.round is not None
        return self._state_in(self.round, hosts, member)

    def _state_in(self, current: Round, hosts: Mapping[int, Host], member: Host) -> str:
        """running, lost, or how the member's part of a round ended."""
        host = hosts.get(member.rank)
        if host is None or host.uuid != member.uuid:
            return "lost"
        if host.round != current.id:  # it has not read of it yet, or will never
            fresh = self.meeting.clock() < self._read_since + self.plan.rdzv_timeout_s
            return "running" if fresh and self.meeting.is_living(host) else "lost"
        if host.state in ("running", "leaving"):
            return "running" if self.meeting.is_living(host) else "lost"
        return host.state

    def _over(self, hosts: Mapping[int, Host], current: Round | None) -> int | None:
        """The exit code of a job that others have ended while this host was there to see it."""
        if current is None:
            return None
        for member in current.members:
            host = hosts.get(member.rank)
            if host is not None and host.uuid == member.uuid and host.state == "over":
                self._say(f"{host} has ended the job with exit code {host.code}")
                return host.code
        states = [self._state_in(current, hosts, member) for member in current.members]
        if all(state == "done" for state in states):
            self._say(f"the job was finished by {', '.join(map(str, current.members))}")
            return runtime.EXIT_OK
        return None

    def _loss(self, hosts: Mapping[int, Host], current: Round | None, is_stopping: bool) -> str:
        """Why this host's processes wait in vain for others, in words; empty where they do not."""
        assert self.round is not None  # it runs
        if current is None or current.id != self.round.id:
            return f"the other hosts have gone on without {self.meeting.me}"
        for member in self.round.members:
            state = self._state_in(self.round, hosts, member)
            if state == "lost":
                here = hosts.get(member.rank)
                if here is not None and here.uuid != member.uuid:
                    return f"{member} is lost: its launcher was started again"
                return (
                    f"{member} is lost: no heartbeat for {self.plan.heartbeat_timeout_s:g} s "
                    "(power failure, network, or its launcher was killed)"
                )
            if state in ("running", "done"):
                continue
            now = self.meeting.clock()
            since = self._left_since.setdefault(member.rank, now)
            if now > since + self.plan.heartbeat_timeout_s and not is_stopping:
                return f"{member} has ended its part of the round ({state})"
        return ""

    def _pass_on(self, attempt: Attempt, hosts: Mapping[int, Host], current: Round | None) -> None:
        """Ask this host's processes to save and end where the round shall."""
        assert self.round is not None and current is not None  # else it was given up
        if attempt.is_stopping:
            return
        members = [hosts[m.rank] for m in self.round.members if m.rank in hosts]
        if current.stop:
            # One host is enough where the processes tell each other: a second notice could reach
            # one that is just leaving.
            first = min(h.rank for h in members if h.state in ("running", "leaving"))
            if self._tells_itself and first != self.meeting.me.rank:
                return
            self._say(f"{current.stop}: saving, then the next round")
        elif self._tells_itself or not any(h.state in ("leaving", "saved") for h in members):
            return
        self._told = True
        attempt.ask_to_stop()

    # --- this host --------------------------------------------------------------------------------

    def _offer(self) -> None:
        # In one word: a leader that heard "waiting" first would choose without knowing for what.
        self.meeting.say(self._count(), state="waiting", port=free_port(""))

    def _count(self) -> Capacity:
        """What this host can run now; nvidia-smi may take seconds to tell."""
        most, before = self.plan.nproc_per_node.most, self.meeting.me
        now = capacity(most, self.sizes.simulate, had_gpus=self._had_gpus)
        self._had_gpus |= now.gpus
        self._next_count = self.meeting.clock() + self.plan.grow_interval_s
        if now.devices != before.devices and self.round is not None:
            self._say(f"{now.devices} devices are here, {before.devices} were")
        return now

    def _say_waiting(self, current: Round | None, hosts: Mapping[int, Host]) -> None:
        me, plan = self.meeting.me, self.plan
        if me.state != "waiting":
            return
        if current is not None and self._runs(current, hosts):
            names = ", ".join(map(str, current.members))
            text = f"round {current.number} runs on {names}: {me} waits as a spare"
        else:
            text = (
                f"{me} waits up to {plan.rdzv_timeout_s:g} s for --nnodes {plan.nnodes} × "
                f"--nproc-per-node {plan.nproc_per_node}"
            )
        if text != self._said:
            self._say(text)
        self._said = text

    def _say(self, text: str) -> None:
        self._write_line(text)


def _refuse_rank(rival: Host) -> None:
    from jaxdist.core.settings import ConfigError

    raise ConfigError(
        [
            f"--node-rank {rival.rank} is taken by a launcher on {rival.address}, which lives. "
            "Give every host another rank, or end that launcher first."
        ]
    )


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number} devices"


def _print(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)

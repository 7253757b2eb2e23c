"""What `collectived top` shows: each view with problems first, old answers said to be old, in any size."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.segment import Segment

from collectived_launcher.top.frame import LatestStatus, make_frame, status_after_failure, status_from_reply
from collectived_launcher.top.state import VIEWS, TopState, View
from collectived_launcher.top.views import build_listing
from collectived_proto.report.findings import collect_findings
from collectived_proto.report.phrases import sanitize_text
from collectived_proto.v1 import common_pb2 as common
from collectived_proto.v1 import status_pb2 as pb


def reply() -> pb.StatusReply:
    """Two groups; in the second rank 1 is late. Worker 1 is lost."""
    answer = pb.StatusReply(
        unix_time=1000.0,
        coordinator=pb.CoordinatorStatus(address="unix:/c.sock", epoch=9, pid=60, uptime_seconds=75, job="j"),
        workers=[
            pb.WorkerStatus(task=0, host="a", pid=61, connected=True, devices=["x/device:CPU:0"], sessions=2),
            pb.WorkerStatus(task=1, host="b", pid=62, connected=False, last_heartbeat_seconds=12),
        ],
        failures=[
            pb.Failure(
                unix_time=990.0, verdict=common.Verdict(group="j/old", generation=3, code=14, message="rank 0 lost")
            )
        ],
    )
    for number, name in enumerate(("quiet", "world")):
        members = [
            common.Member(
                rank=rank, host="a", pid=70 + rank, last_instance=6, last_op="all_reduce(sum)", last_site="t.py:8"
            )
            for rank in range(3)
        ]
        answer.groups.add(
            name=f"j/{name}", generation=number + 4, state="ready", size=3, members=members, collectives_done=1234
        )
    answer.groups[1].in_flight.add(
        instance=7, op="barrier()", site="t.py:90", seconds=2.5, arrived=[0, 2], missing=[1], bytes=2048
    )
    answer.groups[0].in_flight.add(instance=7, op="broadcast(root=0)", seconds=0.1, arrived=[0, 1, 2])
    return answer


FRESH = TopState()


def shown(
    known: LatestStatus, state: TopState = FRESH, now: float = 0.0, width: int = 160, height: int = 30
) -> list[str]:
    """The lines on the screen."""
    console = Console(width=width, height=height, color_system=None)
    segments = list(console.render(make_frame(known, state, now, width, height)))
    return ["".join(segment.text for segment in line).rstrip() for line in Segment.split_lines(segments)]


def rows(view: View, answer: pb.StatusReply | None = None) -> list[tuple[str, ...]]:
    answer = answer or reply()
    return [row.cells for row in build_listing(view, answer, collect_findings(answer)).rows]


def test_it_begins_with_the_job_and_what_hurts() -> None:
    lines = shown(status_from_reply(reply(), 0.0))
    assert lines[0] == "collectived top  job j  up 1 min 15 s  1 of 2 workers  2 groups  6 ranks"
    assert lines[1].split("   ")[0] == " 1 alerts 3"
    assert [line.split()[0] for line in lines[4:10] if line[:1].strip()] == ["WAITING", "LOST", "FAILED"]
    assert "barrier() #7 at t.py:90 has waited 2.5 s for rank 1 (host a, pid 71" in lines[4]
    assert lines[-1].startswith("q quit")


def test_in_every_view_what_hurts_comes_first() -> None:
    assert [row[0] for row in rows(View.GROUPS)] == ["world", "quiet"]
    assert rows(View.RANKS)[0][:2] == ("world", "1")
    assert [row[1] for row in rows(View.IN_FLIGHT)] == ["barrier() #7", "broadcast(root=0) #7"]
    assert rows(View.IN_FLIGHT)[0][3:5] == ("1", "0, 2")
    assert [row[:3] for row in rows(View.WORKERS)] == [("1", "b", "lost"), ("0", "a", "connected")]
    assert rows(View.FAILURES) == [("10.0 s", "old", "UNAVAILABLE", "rank 0 lost")]


def test_sends_and_receives_are_in_flight_too() -> None:
    answer = reply()
    answer.groups[0].posts.add(rank=1, peer=0, op="recv(source=0, tag=3)", site="t.py:95", seconds=75)
    assert rows(View.IN_FLIGHT, answer)[0][:5] == ("quiet", "recv(source=0, tag=3)", "1 min 15 s", "0", "1")


def test_where_waiting_is_normal_nothing_is_red() -> None:
    answer = reply()
    answer.groups[1].idle = True
    found = build_listing(View.IN_FLIGHT, answer, collect_findings(answer))
    assert not any(row.colour for row in found.rows)


def test_every_row_has_a_cell_for_every_column() -> None:
    answer = reply()
    for view in VIEWS:
        found = build_listing(view, answer, collect_findings(answer))
        assert found.rows and all(len(row.cells) == len(found.columns) for row in found.rows), view


def test_nothing_to_show_is_said() -> None:
    known = status_from_reply(pb.StatusReply(coordinator=pb.CoordinatorStatus(address="a", job="j")), 0.0)
    said = [shown(known, TopState(view))[3] for view in VIEWS]
    assert said[0] == "Nothing is wrong." and len(set(said)) == len(VIEWS)
    assert shown(known)[1].endswith("all is well")


def test_an_answer_that_gets_old_says_how_old_and_why() -> None:
    known = status_after_failure(status_from_reply(reply(), 10.0), "no worker answered", 12.0)
    known = status_after_failure(known, "no worker answered", 13.0)
    assert shown(known, now=15.0)[0] == "collectived top  no answer since 3.0 s; this is 5.0 s old: no worker answered"
    assert "job j" in shown(status_from_reply(reply(), 15.0), now=15.0)[0]


def test_a_pause_is_said_and_a_picture_without_a_coordinator_too() -> None:
    assert "paused: this is 4.0 s old" in shown(status_from_reply(reply(), 1.0), TopState(paused=True), now=5.0)[0]
    assert "no coordinator" in shown(status_from_reply(pb.StatusReply(warnings=["it does not answer"]), 0.0))[0]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("width", "height"), [(1, 1), (20, 5), (80, 24), (300, 60)])
def test_it_fits_any_terminal(view: View, width: int, height: int) -> None:
    for help_is_shown in (False, True):
        lines = shown(status_from_reply(reply(), 0.0), TopState(view, help=help_is_shown), width=width, height=height)
        assert len(lines) <= max(height, 1) and all(len(line) <= width for line in lines)


def test_at_80_columns_what_matters_is_still_there() -> None:
    (row,) = [
        line for line in shown(status_from_reply(reply(), 0.0), TopState(View.IN_FLIGHT), width=80) if "barrier" in line
    ]
    assert all(word in row for word in ("world", "2.5 s", "1", "t.py:90"))


def test_long_lists_are_scrolled() -> None:
    answer = reply()
    answer.groups[0].members.extend(common.Member(rank=rank, host="h") for rank in range(3, 100))
    known = status_from_reply(answer, 0.0)
    first = shown(known, TopState(View.RANKS), height=24)
    assert first[-1].endswith("from row 1 of 103") and first[4].split()[:2] == ["world", "1"]
    later = shown(known, TopState(View.RANKS, offset=90), height=24)
    assert later[-1].endswith("from row 85 of 103"), "the last page is full"
    assert later[-2].split()[:2] == ["world", "2"]


def test_names_cannot_steer_the_terminal() -> None:
    assert sanitize_text("a\x1b[2Jb\u202ec\td\n") == "a\ufffd[2Jb\ufffdc\ufffdd\n"
    answer = reply()
    answer.groups[1].name = "\x1b]0;evil\x07[bold]x"
    answer.warnings.append("\x9b2J\u2028")
    for view in VIEWS:
        text = "\n".join(shown(status_from_reply(answer, 0.0), TopState(view)))
        assert not any(character in text for character in "\x1b\x07\x9b\u2028")
    assert "[bold]x" in "\n".join(shown(status_from_reply(answer, 0.0), TopState(View.GROUPS))), "names are no markup"


def test_what_was_finished_and_what_was_called_last_are_two_facts() -> None:
    answer = reply()
    member = answer.groups[1].members[0]
    member.last_instance, member.last_op, member.last_site = 2, "barrier()", "x.py:7"
    (row,) = [row for row in rows(View.RANKS, answer) if row[:2] == ("world", "0")]
    assert row[6:9] == ("#2", "barrier()", "x.py:7")


def test_a_group_that_forms_and_hurts_is_first_and_says_from_which_size_on_it_may_start() -> None:
    answer = reply()
    del answer.groups[1].in_flight[:]
    for name in ("zeta", "alpha"):  # both of generation 0; only one waits for somebody
        answer.groups.add(name=f"j/{name}", state="forming", size=8, min_size=4)
    answer.groups[2].waiting_for = "waiting for 4 more"
    first, *others = rows(View.GROUPS, answer)
    assert first[:3] == ("zeta", "forming", "0 of 4 to 8") and others[0][0] == "alpha"


def test_a_worker_that_answers_for_itself_is_not_lost() -> None:
    alone = pb.StatusReply(workers=[pb.WorkerStatus(task=0, host="a", connected=False)])
    assert rows(View.WORKERS, alone)[0][2] == "not connected" and "1 worker" in shown(status_from_reply(alone, 0.0))[0]

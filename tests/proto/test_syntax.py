"""Expressions are parsed though another thread parses, too."""

from __future__ import annotations

import ast
import gc
import threading
import time

import pytest

from collectived_proto.syntax import parse_expression


class Slow:
    """Lets other threads run while it is collected."""

    def __del__(self) -> None:
        time.sleep(0.001)


def test_a_failure_of_the_builder_of_trees_is_not_the_text_s(monkeypatch: pytest.MonkeyPatch) -> None:
    parse, failures = ast.parse, [SystemError("AST constructor recursion depth mismatch (before=75, after=73)")] * 3

    def parse_at_last(text: str, **options: str) -> ast.AST:
        if failures:
            raise failures.pop()
        return parse(text, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(ast, "parse", parse_at_last)
    assert ast.literal_eval(parse_expression("'a'")) == "a"
    assert not failures


def test_threads_that_collect_garbage_parse_side_by_side() -> None:
    found: list[str] = []

    def parse(depth: int) -> None:
        if depth:
            parse(depth - 1)
            return
        for _ in range(100):
            slow = Slow()
            slow.__dict__["me"] = slow
            del slow
            found.append(ast.literal_eval(parse_expression("'a'")))

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        threads = [threading.Thread(target=parse, args=(9 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    assert found == ["a"] * 400


@pytest.mark.parametrize("text", ["", "a b", "x = 1"])
def test_what_is_no_expression_is_refused(text: str) -> None:
    with pytest.raises(SyntaxError):
        parse_expression(text)

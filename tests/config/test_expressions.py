"""Expressions call what is offered and nothing else; whatever else is written is refused in one
line, and in few steps."""

import ast
import builtins
import contextlib
import string
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.config import ConfigError
from jaxformer.config.expressions import evaluate, read


@dataclass(frozen=True)
class Point:
    x: float = 0.0
    y: int | None = None


class Open:
    """A plain class, which alone stands for an object with its defaults."""

    def __init__(self, *arguments, **named):
        self.arguments, self.named = arguments, named


class Recorder:
    """Functions under the names a, b, c; `called` lists the calls."""

    def __init__(self):
        self.called = []
        self.names = {name: self.function(name) for name in "abc"}

    def function(self, name):
        def recorded(*arguments, **named):
            self.called.append(name)
            return arguments

        return recorded


@contextlib.contextmanager
def steps_of_python():
    """Counts calls and returns of functions: a measure of work that is equal on all machines."""
    steps = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: steps.update([event]))
    try:
        yield steps
    finally:
        sys.setprofile(before)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (" -1.5 ", -1.5),
        ("+3", 3),
        ("'a'", "a"),
        ("'a' 'b'", "ab"),
        ("None", None),
        ("True", True),
        ("(1, (2, 'x'))", (1, (2, "x"))),
        ("[1, 2]", (1, 2)),
        ("{'a': 1, 2: None}", {"a": 1, 2: None}),
        ("5 & 4 | 2", 6),
        ("Point", Point()),
        ("Point()", Point()),
        ("Point(1, y=2)", Point(1.0, 2)),
        ("p", Point(7.0)),
        ("(p, Point)", (Point(7.0), Point())),
        ("-inf", -float("inf")),
        (r"'\d'", r"\d"),
    ],
)
def test_values(text, value):
    made = evaluate(text, {"Point": Point, "p": Point(7.0)})
    assert made == value and type(made) is type(value)


def test_arguments_of_a_config_have_the_types_of_its_fields():
    made = evaluate("Point(1)", {"Point": Point})
    assert type(made.x) is float
    with pytest.raises(ConfigError, match=r"^Point\(y=...\): expected int or None, got 1.5$"):
        evaluate("Point(1, 1.5)", {"Point": Point})


def test_a_class_alone_is_an_object_with_its_defaults():
    assert isinstance(evaluate("Open", {"Open": Open}), Open)
    assert evaluate("Open(1, a=2)", {"Open": Open}).named == {"a": 2}


def fails(x):
    raise {
        "value": ValueError("two\nlines"),
        "none": ValueError(),
        "key": KeyError("k"),
        "config": ConfigError("c"),
    }[x]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fails('value')", "two lines"),
        ("fails('none')", "ValueError"),
        ("fails('key')", "'k'"),
        ("fails('config')", "c"),
        ("fails()", "fails(x): missing a required argument: 'x'"),
        ("fails(1, 2)", "fails(x): too many positional arguments"),
        ("p()", "p cannot be called; use it without ()"),
        ("fals(1)", "there is no 'fals' to choose from; did you mean fails?"),
        ("p.x", "'p.x': expected a literal or a call such as Name(field=value)"),
        ("-'a'", "\"-'a'\": expected a literal or a call such as Name(field=value)"),
        ("fails & p", "unsupported operand type(s) for &: 'function' and 'Point'"),
        ("", "invalid syntax, in an expression"),
        ("1 +", "invalid syntax, in an expression"),
    ],
)
def test_mistakes(text, expected):
    with pytest.raises(ConfigError) as caught:
        evaluate(text, {"fails": fails, "p": Point()})
    assert str(caught.value) == expected


REFUSED = [
    "__import__('os')",
    "open('x')",
    "eval('1')",
    "exec('1')",
    "a.__class__",
    "a.__globals__['x']",
    "a().__class__.__bases__",
    "().__class__",
    "'{0.__class__}'.format(a)",
    "a[0]",
    "a(1)[0]",
    "a(1)(2)",
    "(a)(b)(c)",
    "(lambda: a())()",
    "lambda: 1",
    "[a() for x in (1, 2)]",
    "{a() for x in (1, 2)}",
    "{1: a() for x in (1, 2)}",
    "(a() for x in (1, 2))",
    "f'{a()}'",
    "f'{1}'",
    "(x := a())",
    "a(x := 1)",
    "a(*b())",
    "a(**{'x': 1})",
    "a(**b())",
    "a(x=1, x=2)",
    "[*b()]",
    "{**b()}",
    "{1, 2}",
    "a() if b() else c()",
    "a() and b()",
    "not a()",
    "1 < 2",
    "a() == b()",
    "1 + 1",
    "3 / 2",
    "2 ** 3",
    "9 ** 9 ** 9",
    "1 << 10 ** 9",
    "7 % 2",
    "7 // 2",
    "2 @ 3",
    "'a' * 10 ** 9",
    "'a' * 1000000000",
    "(1, 2) * 1000000000",
    "'a' + 'b'",
    "'%s' % a",
    "True + True",
    "1j",
    "b'x'",
    "...",
    "await a()",
    "(yield a())",
    "import os",
    "a(); b()",
    "a()\nb()",
    "x = a()",
    "_",
    "__builtins__",
    "__name__",
    "a" * 20_000,
    "(" * 5_000 + ")" * 5_000,
    "-" * 5_000 + "1",
    "~" * 50_000 + "1",
    "[" * 9_000,
    "a(" * 3_000 + ")" * 3_000,
    "not " * 2_400 + "1",
    "lambda:" * 1_400 + "1",
    "1" + "+1" * 4_999,
    "1" * 9_999,
    "1" + "*9" * 100_000,
    "\x00",
    "\ud800",
    "'\\N{no such}'",
]


@pytest.mark.thorough_after(251)
@pytest.mark.parametrize("text", REFUSED, ids=lambda text: ascii(text[:20]))
@pytest.mark.parametrize("hint", [object, int, tuple[int, ...], bool | float | None])
def test_refused_without_a_call_in_one_line_and_few_steps(text, hint, monkeypatch, recwarn):
    recorder = Recorder()
    for name in ("__import__", "eval", "exec", "open", "getattr"):
        monkeypatch.setattr(builtins, name, guard(name, getattr(builtins, name), recorder.called))
    with pytest.raises(ConfigError) as caught, steps_of_python() as steps:
        read(text, hint, recorder.names)
    assert sum(steps.values()) < 100 * len(text) + 100_000
    monkeypatch.undo()
    # parts inside what is refused may have been called, nothing else
    assert set(recorder.called) <= set("abc")
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300
    assert not recwarn.list


def guard(name, function, called):
    """The builtin, noting a call from an expression: one whose arguments are text of ours."""

    def guarded(*arguments, **named):
        if arguments[:1] in (("os",), ("x",), ("1",)):
            called.append(name)
        return function(*arguments, **named)

    return guarded


def test_huge_numbers_are_refused_where_a_float_is_due():
    text = "0x" + "f" * 9_000
    for hint in (float, float | None, tuple[float, ...]):
        with pytest.raises(ConfigError):
            read(text, hint, {})
    with pytest.raises(ConfigError):
        read("1" + "*0xffffffff" * 800, object, {})


# Random expressions

WORDS = "a b c d 1 2.5 's' None True 1e3 __import__ open eval print __builtins__"
OPERATORS = "+ - * / ** // % @ << >> & | ^ and or < == in is"
atoms, operators = st.sampled_from(WORDS.split()), st.sampled_from(OPERATORS.split())


def extended(part):
    pair = st.tuples(part, part)
    dunder = st.sampled_from(["__class__", "__globals__", "__call__", "x", "__subclasses__()"])
    name = st.sampled_from(["x", "y", "__class__"])
    return st.one_of(
        st.tuples(part, operators, part).map(" ".join),
        st.tuples(
            st.sampled_from(["-", "~", "not ", "*", "**", "await ", "lambda: ", "lambda x: "]), part
        ).map("".join),
        st.lists(part, max_size=3).map(lambda items: f"({', '.join(items)})"),
        st.lists(part, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        pair.map(lambda items: f"{{{items[0]}: {items[1]}}}"),
        st.tuples(part, st.lists(part, max_size=2)).map(
            lambda call: f"{call[0]}({', '.join(call[1])})"
        ),
        st.tuples(part, name, part).map(lambda call: f"{call[0]}({call[1]}={call[2]})"),
        st.tuples(part, part).map(lambda call: f"{call[0]}(*{call[1]})"),
        st.tuples(part, part).map(lambda call: f"{call[0]}(**{call[1]})"),
        st.tuples(part, dunder).map(".".join),
        pair.map(lambda items: f"{items[0]}[{items[1]}]"),
        pair.map(lambda items: f"[{items[0]} for x in {items[1]}]"),
        pair.map(lambda items: f"({items[0]} if {items[1]} else 1)"),
        part.map(lambda inner: f"(x := {inner})"),
        part.map(lambda inner: "f'{" + inner.replace("'", '"') + "}'"),
    )


expressions = st.recursive(atoms, extended, max_leaves=8)
noise = st.text(st.sampled_from(string.printable), max_size=40)


@pytest.mark.thorough
@settings(max_examples=600, deadline=None)
@given(expressions | noise)
def test_nothing_but_offered_names_is_called(text):
    recorder = Recorder()
    names = dict(recorder.names)
    used = set()
    with contextlib.suppress(SyntaxError, ValueError):
        used = {
            node.id
            for node in ast.walk(ast.parse(text.strip(), mode="eval"))
            if isinstance(node, ast.Name)
        }
    kinds = (
        ast.Expression,
        ast.Constant,
        ast.Name,
        ast.Load,
        ast.Call,
        ast.keyword,
        ast.Tuple,
        ast.List,
        ast.Dict,
        ast.UnaryOp,
        ast.BinOp,
        ast.operator,
        ast.unaryop,
    )
    try:
        evaluate(text, names)
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1 and " at 0x" not in str(error)
    else:
        assert used <= {"a", "b", "c", "inf", "nan"}
        assert all(
            isinstance(node, kinds) for node in ast.walk(ast.parse(text.strip(), mode="eval"))
        )
    assert set(recorder.called) <= used & set("abc")

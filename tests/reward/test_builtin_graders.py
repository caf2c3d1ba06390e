"""The graders that come with the plugin, and what makes a response a solved one."""

import random
import re
import time
from pathlib import Path

import pytest

from mindspeed_rl_plugin.reward import solved
from mindspeed_rl_plugin.reward.answers import graded_part
from mindspeed_rl_plugin.reward.builtin import check_answers, make_builtin
from mindspeed_rl_plugin.reward.specs import parse_specs

MATH = [
    ("no idea", "42", 0.0),
    ("", "42", 0.0),
    ("$x^2+2x+1$", "(x+1)^2", 1.0),
    ("\\boxed{3/4}", "\\frac{3}{4}+x", 0.0),
    ("Answer: 72", "Natalia sold 48/2 = 24 clips\n#### 72", 1.0),
    ("100000", "1e5", 1.0),
    ("it is 42", "The result is $6 \\cdot 7$", 1.0),
    ("-09\\lim^\\begin{pmatrix}\\frac\\frac\\mathbb{R}\\left(\\sin\\end{pmatrix}%", "3", 0.0),
]


@pytest.fixture(scope="module")
def math():
    return make_builtin("math", None)


@pytest.mark.parametrize(("response", "answer", "want"), MATH)
def test_math(math, response: str, answer: str, want: float) -> None:
    assert math(response, answer) == want


PAGE = Path(__file__).parents[2].joinpath("docs/data-and-rewards.md").read_text()
CODE = re.compile(r"(?<!`)(`+)(?!`) ?(.+?) ?(?<!`)\1(?!`)")  # as Markdown has it
ROWS = [
    [CODE.findall(cell) for cell in line.strip("| ").split(" | ")]
    for line in PAGE.partition("### What the graders read")[2].splitlines()
    if re.match(r"\| `(math|exact|regex)`", line)
]
EXAMPLES = [
    (grader[0][1], grader[-1][1], response, answer[0][1], want)
    for grader, answer, *grades in ROWS
    for want, cell in zip((1.0, 0.0), grades, strict=True)
    for _, response in cell
]


def test_the_page_has_examples() -> None:
    assert len(ROWS) == 19 and len(EXAMPLES) > 75 and all(len(row) == 4 and all(row) for row in ROWS)


@pytest.mark.parametrize(("grader", "pattern", "response", "answer", "want"), EXAMPLES)
def test_an_example_of_the_page(math, grader: str, pattern: str, response: str, answer: str, want: float) -> None:
    assert (math if grader == "math" else make_builtin(grader, pattern))(response.replace("⏎", "\n"), answer) == want


@pytest.mark.parametrize("unit", [" km/h", "°", "€", " square meters"])
def test_what_surrounds_a_number_and_its_unit_is_not_read(math, unit: str) -> None:
    for around in ("`{}`", '"{}"', "“{}”", "*{}*", "**{}**", "It is `{}`.", "{}"):
        assert [math(around.format(f"{n}{unit}"), "12") for n in (12, 13)] == [1.0, 0.0], around


NO_UNITS = (
    "halves thirds quarters fourths fifths tenths hundredths hundred thousand million billion dozen score pairs and or "
    "alpha theta lambda omega pi minus plus times modulo root squared cubed factorial not wrong unitary"
)


@pytest.mark.parametrize("number", ["3", "-1.5", "10 000", "1/2"])
def test_a_number_with_a_word_that_is_no_unit_is_another_answer(math, number: str) -> None:
    """As a response, and as a ground truth, where math-verify can parse it."""
    letters = random.Random(36)
    made = ["".join(letters.choices("bcdfghjklmnpqrtvwxyz", k=letters.randint(3, 9))) + "o" for _ in range(50)]
    for word in [*NO_UNITS.split(), *made]:
        said = f"{number} {word}"
        assert math(f"\\boxed{{{said}}}", number) == math(f"<answer>{said}</answer>", number) == 0.0, word
        assert word in ("and", "or", *made) or math(f"\\boxed{{{number}}}", said) == 0.0, word
    assert math(f"\\boxed{{{number} kilometers per hour}}", number) == 1.0


@pytest.mark.parametrize("character", ["\n", "`", "*", "1 ", "[", "1 1/1 ", "'1", "#", "答案1", "\\boxed{"])
def test_a_long_text_is_searched_in_a_moment(character: str) -> None:
    """No pattern looks at one place again and again."""

    def seconds() -> float:
        began = time.process_time()
        graded_part(character * 20_000)
        return time.process_time() - began

    assert any(seconds() < 1.0 for _ in range(3))  # 0.02 s; in a crowd one was seen that took 1.3 s


@pytest.mark.parametrize("answer", ["", "\\frac{1}{", "???", "NaN", "-nan "])
def test_math_without_a_ground_truth_is_an_error(math, answer: str) -> None:
    with pytest.raises(ValueError, match="cannot be parsed"):
        math("1", answer)


def test_ground_truths_are_read_at_the_start() -> None:
    """By the graders that compare with them; numbers cost nothing."""
    specs = parse_specs(["math=0.5", "environment"], None)
    check_answers(specs, None, {"line 1": "12", "line 2": "\\frac{1}{2}", "line 3": "east"})
    for answer in ("", "NaN", "9" * 5000):
        with pytest.raises(ValueError, match="^line 3: the answer '.{0,80} cannot be parsed as mathematics"):
            check_answers(specs, None, {"line 1": "12", "line 2": "x+1", "line 3": answer})
    with pytest.raises(ValueError, match="line 2: exact: .*--rl-answer-key"):
        check_answers(parse_specs(["exact"], None), None, {"line 1": "NaN", "line 2": " "})
    check_answers(parse_specs(["environment"], None), None, {"line 1": ""})


RULES = [
    ("exact", None, " a \n b ", "a b", 1.0),
    ("regex", r"#(\d)?", "#2 #1", " 2", 0.0),
    ("regex", r"#(\d)?", "#", " 2", 0.0),
    ("regex", r"\d+", "x 2 y", "2", 1.0),
    ("regex", r"\d+", "x 22", "2", 0.0),
]


@pytest.mark.parametrize(("name", "regex", "response", "answer", "want"), RULES)
def test_exact_and_regex(name: str, regex: str | None, response: str, answer: str, want: float) -> None:
    grader = make_builtin(name, regex)
    assert grader(response, answer) == want
    with pytest.raises(ValueError, match=f"{name}: .* no ground truth"):
        grader(response, " ")


SOLVED = [
    ((1.0, 1.0), (1.0, 1.0), True),
    ((1.0, 0.0), (1.0, 1.0), False),
    ((1.0, 0.2), (1.0, -0.5), True),  # a length penalty: the total may be below the sum of the weights
    ((0.0, -3.0), (1.0, -0.5), False),  # and the total of a wrong answer, 1.5, above it
    ((0.0, 20.0), (1.0, 0.1), False),  # a bonus that makes up for a wrong answer in the total
    ((3.0, 0.0), (0.25, 0.0), True),
    ((0.1 + 0.2 + 0.7 - 1e-7,), (2.0,), True),
]


@pytest.mark.parametrize(("parts", "weights", "right"), SOLVED)
def test_solved_asks_every_grader_of_positive_weight(parts, weights, right) -> None:
    assert solved(parts, weights) is right
    with pytest.raises(ValueError, match="is positive"):
        solved(parts, [-abs(w) for w in weights])

"""GSM8K and RULER: how answers are scored, which questions are asked, what is kept. Numbers are worked out by hand."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "quality")]

import engine_caches  # noqa: E402
import ruler  # noqa: E402
import task_data  # noqa: E402
import task_rows  # noqa: E402
import task_scores  # noqa: E402
import tasks  # noqa: E402
from task_questions import Answers, Question, ordered, read, write  # noqa: E402

# answers


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("9 * 2 = 18.\n#### 18", "18", "18"),
        ("#### $1,234.", "1234", "1234"),
        ("#### -5", "-5", "-5"),
        ("#### 18\nQuestion 2 is harder", "18", "2"),
        ("So the answer is 3.", None, "3"),
        ("She has 3 apples, that is $4.50.", None, "4.50"),
        ("#### none", None, None),
        ("", None, None),
    ],
)
def test_number_of_an_answer(text: str, strict: str | None, flexible: str | None) -> None:
    assert task_scores.strict(text) == strict
    assert task_scores.flexible(text) == flexible


def test_scores() -> None:
    assert task_scores.scores_of("gsm8k", "so 1,018\n#### 18", ["18"]) == {"score": 1, "flexible": 1}
    assert task_scores.scores_of("gsm8k", "it is 18", ["18"]) == {"score": 0, "flexible": 1}
    assert task_scores.scores_of("gsm8k", "#### 1018", ["1,018"]) == {"score": 1, "flexible": 1}
    assert task_scores.scores_of("all", " abc, and XYZ", ["ABC", "xyz", "klm", "n"]) == {"score": 0.75}  # n is in "and"
    assert task_scores.scores_of("any", "In Ghana.", ["Accra", "ghana"]) == {"score": 1}
    assert task_scores.scores_of("any", "In Togo.", ["Accra", "ghana"]) == {"score": 0}


# intervals


def test_interval_of_a_score() -> None:
    # 8 of 10, z² = 3.841459: (0.8 + 0.1920729) / 1.3841459 ± 1.959964 / 1.3841459 · √(0.016 + 0.00960365)
    low, high = task_scores.wilson(8, 10)
    assert low == pytest.approx(0.716739 - 0.226577, abs=2e-5)
    assert high == pytest.approx(0.716739 + 0.226577, abs=2e-5)
    assert task_scores.wilson(0, 10) == pytest.approx((0, 3.841459 / 13.841459), abs=1e-5)
    assert task_scores.wilson(10, 10) == pytest.approx((10 / 13.841459, 1), abs=1e-5)


def test_interval_of_a_difference() -> None:
    # 98 questions: 4 are lost, 2 are won. (2 − 4) / 100 ± 1.959964 · √(6 + 1 − 4 / 100) / 100
    low, high = task_scores.paired([-1] * 4 + [1] * 2 + [0] * 92)
    assert low == pytest.approx(-0.02 - 0.0517073, abs=1e-6)
    assert high == pytest.approx(-0.02 + 0.0517073, abs=1e-6)
    # no difference in 98 questions is not certainty: ± 1.959964 · √1 / 100
    assert task_scores.paired([0] * 98) == pytest.approx((-0.01959964, 0.01959964))
    # parts of a question: squares 1/4 + 1/4
    low, high = task_scores.paired([0.5, 0.5])
    assert (low, high) == pytest.approx((0.25 - 1.959964 * math.sqrt(1.25) / 4, 0.25 + 1.959964 * math.sqrt(1.25) / 4))


# questions


def question(name: str, group: str = "g", kind: str = "gsm8k", right: str = "1") -> Question:
    return Question(name, group, kind, f"Question: {name}", [right], 8, [])


def test_parts_are_the_same_whatever_the_order() -> None:
    some = [question(f"q{i}", f"g{i % 3}") for i in range(30)]
    other = list(some)
    Random(0).shuffle(other)
    assert ordered(some) == ordered(other)
    assert ordered(some) != some
    assert sorted(each.group for each in ordered(some)[:3]) == ["g0", "g1", "g2"]
    assert {each.group: 4 for each in some} == {
        group: sum(each.group == group for each in ordered(some)[:12]) for group in ("g0", "g1", "g2")
    }


@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_questions_of_a_file(tmp_path: Path, ending: str) -> None:
    some = [question(f"q{i}") for i in range(5)]
    write(tmp_path / f"a.jsonl{ending}", some)
    assert read(tmp_path, "a") == ordered(some)
    with pytest.raises(SystemExit, match=r"has no b\.jsonl"):
        read(tmp_path, "b")


def test_five_examples() -> None:
    solved = [f"Question: {i}?\nAnswer: It is {i}. So the answer is {i}." for i in range(8)]
    prompt = task_data.five_shots("\n\n".join([*solved, "Question: 9?\nAnswer:"]))
    assert prompt.split("\n\n")[4:] == ["Question: 4?\nAnswer: It is 4.\n#### 4", "Question: 9?\nAnswer:"]
    assert prompt.count("####") == 5
    with pytest.raises(SystemExit):
        task_data.five_shots("\n\n".join([*solved[:4], "Question: 9?\nAnswer:"]))


# what is kept


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    some = [question(f"q{i}") for i in range(4)]
    answers = Answers(tmp_path / "x" / "a.jsonl")
    answers.begin({"device": "a"}, {})
    answers.add(some[0], "#### 1", 3, "stop")
    answers.add(some[1], "#### 2", 3, "length")
    with answers.path.open("a") as file:
        file.write('{"id": "q2", "mark": "')  # cut
    again = Answers(answers.path)
    assert again.missing(some) == some[2:]
    again.begin({"device": "a"}, {"bytes_per_token": 8})
    again.add(some[2], "#### 1", 3, "stop")
    assert [json.loads(line).get("id") for line in again.path.read_text().splitlines()] == [None, "q0", "q1", "q2"]
    assert Answers(again.path).missing(some) == some[3:]
    changed = some[0]._replace(prompt="another")
    assert Answers(again.path).missing([changed, some[1]]) == [changed]
    again.begin({"device": "b"}, {})
    assert Answers(again.path).missing(some) == some


@pytest.fixture
def args(tmp_path: Path) -> argparse.Namespace:
    model = tmp_path / "model"
    model.mkdir()
    return argparse.Namespace(model=model, dtype="bfloat16", work=tmp_path / "work")


def answered(args: argparse.Namespace, cache: str, questions: list[Question], texts: list[str]) -> None:
    answers = Answers(task_rows.file_of(args, cache, "t"))
    answers.begin({"device": "d"}, {"bytes_per_token": 8})
    for each, text in zip(questions, texts, strict=False):
        answers.add(each, text, 2, "stop")


def test_row(args: argparse.Namespace) -> None:
    some = [question(f"q{i}", "ab"[i % 2]) for i in range(5)]
    answered(args, "stock", some, ["#### 1", "#### 1", "#### 2", "#### 1"])
    answered(args, "k4v4", some, ["#### 1", "#### 3", "#### 1", "is 1", "#### 1"])
    row = task_rows.row_of(args, "k4v4", "t", some)
    assert (row["model"], row["cache"], row["questions"], row["of"]) == ("model", "k4v4", 5, 5)
    assert (row["score"], row["flexible"], row["device"], row["bytes_per_token"]) == (0.6, 0.8, "d", 8)
    assert row["groups"] == {"a": [1, 3], "b": [0, 2]}
    found = row["against_stock"]  # of the four that both have answered: q1 and q3 are lost, q2 is won
    assert (found["questions"], found["lower"], found["higher"], found["difference"]) == (4, 2, 1, -0.25)
    assert (found["flexible"]["lower"], found["flexible"]["higher"], found["identical"]) == (1, 1, 1)
    assert "against_stock" not in task_rows.row_of(args, "stock", "t", some)
    assert task_rows.row_of(args, "k8v8", "t", some)["questions"] == 0
    lines = task_rows.table([row, {"task": "t", "cache": "nvfp4", "failed": "ValueError: no"}]).splitlines()
    # −1 / 6 ± 1.959964 · √(3 + 1 − 1 / 6) / 6
    assert lines[2] == "| t | `k4v4` | 5 | 60.0% (23.1% to 88.2%) | 2, 1 | -25.0 (-80.6 to +47.3) |"
    assert lines[3] == "| t | `nvfp4` | failed: ValueError: no |  |  |  |"


def test_a_cache_that_fails_has_a_row(
    args: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [question(f"q{i}") for i in range(3)]
    write(tmp_path / "t.jsonl", some)
    asked: list[tuple[str, int]] = []

    def run(args: argparse.Namespace, cache: str, number: int, end: float) -> str | None:
        asked.append((cache, number))
        if cache == "nvfp4":
            return "ValueError: not on this device"
        answered(args, cache, read(args.data, "t")[:number], ["#### 1"] * number)
        return None

    monkeypatch.setattr(tasks, "run", run)
    given: dict[str, Any] = {"data": tmp_path, "tasks": "t", "caches": "stock,nvfp4,k4v4", "questions": "1,3"}
    for name, value in {**given, "seconds": 1e3, "again": False, "json": tmp_path / "rows.json"}.items():
        setattr(args, name, value)
    tasks.measure(args)
    assert asked == [("stock", 1), ("nvfp4", 1), ("k4v4", 1), ("stock", 3), ("k4v4", 3)]
    rows = json.loads(args.json.read_text())["rows"]
    assert [(row["cache"], row["questions"]) for row in rows] == [("stock", 3), ("nvfp4", 0), ("k4v4", 3)]
    assert rows[1]["failed"] == "ValueError: not on this device"
    assert rows[2]["against_stock"]["questions"] == 3
    tasks.measure(args)  # nothing is left
    assert len(asked) == 5
    args.dtype, args.caches, args.questions = "float16", "nvfp4", "1"  # it may do what the other could not
    tasks.measure(args)
    assert asked.pop() == ("nvfp4", 1)
    args.dtype, args.questions = "bfloat16", "1,3"
    monkeypatch.setattr(sys, "argv", ["tasks.py", "--again"])
    args.again, args.caches = True, "k4v4"
    tasks.measure(args)
    assert asked[5:] == [("k4v4", 1), ("k4v4", 3)]
    commands = json.loads(args.json.read_text())["commands"]
    assert (len(commands), commands[1]) == (2, "python tasks.py --again")


class Engine:
    """Answers one question a step."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.llm_engine = self
        self.waiting: list[tuple[str, Any]] = []

    def add_request(self, name: str, prompt: dict[str, str], params: Any) -> None:
        self.waiting.append((name, params))

    def step(self) -> list[SimpleNamespace]:
        name, params = self.waiting.pop()
        said = SimpleNamespace(text=f"{name} {params.max_tokens}", token_ids=[1, 2], finish_reason="stop")
        return [SimpleNamespace(finished=True, request_id=name, outputs=[said])]


def test_only_what_is_missing_is_asked(
    args: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [question(f"q{i}") for i in range(4)]
    write(tmp_path / "t.jsonl", some)
    first = ordered(some)[0]
    answers = Answers(task_rows.file_of(args, "k4v4", "t"))
    answers.begin({"device": "d"}, {"bytes_per_token": 8})
    answers.add(first, "known", 1, "stop")
    made: list[Engine] = []

    def engine(**options: Any) -> Engine:
        made.append(Engine(**options))
        return made[-1]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=engine, SamplingParams=SimpleNamespace))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(tasks, "facts_of", lambda *given: {"device": "d"})
    monkeypatch.setattr(tasks, "size_of", lambda *given: {"bytes_per_token": 8})
    given = {"data": tmp_path, "tasks": "t", "memory": 0.5, "cache_bytes": None, "context": 64, "sequences": 2}
    for name, value in {**given, "chunk": 32, "eager": True, "engine": '{"block_size": 64}'}.items():
        setattr(args, name, value)
    tasks.ask(args, "k4v4", 3, 0)  # no time: the engine starts and is asked nothing
    assert Answers(answers.path).missing(some) == [each for each in some if each != first]
    tasks.ask(args, "k4v4", 3, 60)
    found = Answers(answers.path)
    assert found.missing(ordered(some)) == ordered(some)[3:]
    assert found.lines[first.id]["text"] == "known"
    other = ordered(some)[1]
    assert found.lines[other.id]["text"] == f"t {other.id} 8"
    told = made[-1].options
    assert told["additional_config"] == {"aurakv": "k4v4"}
    assert (told["block_size"], told["gpu_memory_utilization"]) == (64, 0.5)
    assert "kv_cache_memory_bytes" not in told


def test_sentence_of_a_failure() -> None:
    error = RuntimeError("engine failed")
    error.__cause__ = ValueError("no fp8\n  on this device")
    assert tasks.sentence_of(error) == "ValueError: no fp8 on this device"
    assert tasks.sentence_of(KeyError()) == "KeyError: no reason given"


def test_names_of_caches(tmp_path: Path) -> None:
    assert engine_caches.options_of("stock", tmp_path) == engine_caches.options_of("bf16", tmp_path) == {}
    assert engine_caches.options_of("int4_per_token_head", tmp_path) == {"kv_cache_dtype": "int4_per_token_head"}
    assert engine_caches.options_of("k4v4", tmp_path) == {"additional_config": {"aurakv": "k4v4"}}
    assert engine_caches.name_of("a/b/policy.json") == "policy"


# RULER


class Tokenizer:
    """Words are tokens."""

    chat_template = None
    bos_token = None

    def __call__(self, text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> ruler.Sources:
    folder = tmp_path_factory.mktemp("ruler")
    given = {"tokens_to_generate": 20, "template": "Some {type_needle_v} are\n{context}\nWhat are all of {query}?"}
    wording = {"niah": {**given, "answer_prefix": " They are"}}
    for name in ("variable_tracking", "common_words_extraction", "freq_words_extraction", "qa"):
        wording[name] = {"tokens_to_generate": 20, "template": "Read: {context}\nQ {query}", "answer_prefix": " A:"}
    (folder / "wording.json").write_text(json.dumps(wording))
    text = " ".join(f"Sentence {i} of an essay." for i in range(3000))
    (folder / "PaulGrahamEssays.json").write_text(json.dumps({"text": text}))
    for kind in ("noun", "adjective", "verb"):
        (folder / f"{kind}list.txt").write_text("\n".join(f"{kind}{i}" for i in range(300)))
    asked = {"question": "Who?", "answers": [{"text": "Ada"}], "is_impossible": False}
    paragraphs = [{"context": f"Ada, {i} " + "word " * 20, "qas": [asked]} for i in range(200)]
    (folder / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hotpot = [{"question": "Who?", "answer": "Bo", "context": [[f"T{i}", ["Bo is ", "it."]]]} for i in range(900)]
    (folder / "hotpotqa.json").write_text(json.dumps(hotpot))
    return ruler.Sources(folder)


def test_samples_have_the_length_and_the_answer(sources: ruler.Sources) -> None:
    made = list(ruler.questions(sources, Tokenizer(), 2000, 2))
    assert [each.group for each in made[::2]] == list(ruler.tasks(2000, 0))
    assert len({each.id for each in made}) == 26
    for each in made:
        assert 1600 < len(each.prompt.split()) + each.new <= 2000, each.id
        assert all(right in each.prompt for right in each.expected), each.id
    assert made[::2] == list(ruler.questions(sources, Tokenizer(), 2000, 1))  # whatever the number of samples


def test_needles(sources: ruler.Sources) -> None:
    by_name = {each.group: each for each in ruler.questions(sources, Tokenizer(), 2000, 1)}
    one = by_name["niah_multikey_1"]
    assert one.prompt.startswith("A number is\n")
    assert one.prompt.endswith(" They is")
    assert one.prompt.count("special magic numbers") == 4
    assert [len(by_name[f"niah_multi{kind}"].expected) for kind in ("key_1", "value", "query")] == [1, 4, 4]
    four = by_name["niah_multivalue"]
    asked = four.prompt.rsplit("What are all of ", 1)[1].split("?")[0]
    for right in four.expected:
        assert f"One of the special magic numbers for {asked} is: {right}." in four.prompt


def test_words_and_variables(sources: ruler.Sources) -> None:
    by_name = {each.group: each for each in ruler.questions(sources, Tokenizer(), 2000, 1)}
    listed = by_name["cwe"].prompt.rsplit("Read: ", 1)[1].split()
    assert all(listed.count(word) == 30 for word in by_name["cwe"].expected)
    assert len(by_name["cwe"].expected) == 10
    words = by_name["fwe"].prompt.split()
    counts = [words.count(word) for word in ["...", *by_name["fwe"].expected]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] / counts[1] == pytest.approx(4, rel=0.02)
    names = by_name["vt"].expected
    assert len(set(names)) == 5
    chain = [line for line in by_name["vt"].prompt.rsplit("Read: ", 1)[1].splitlines() if "VAR" in line]
    assert chain[1:] == [f"VAR {new} = VAR {old}" for old, new in pairwise(names)]
    assert chain[0] == f"VAR {names[0]} = " + by_name["vt"].prompt.rsplit("Q ", 1)[1].split()[0]


def test_largest_size() -> None:
    assert ruler.largest(lambda size: size <= 50, 1, None) == 50
    assert 990 < ruler.largest(lambda size: size <= 1000, 7, None) <= 1000
    assert ruler.largest(lambda size: size <= 50, 1, 60) == 50
    assert ruler.largest(lambda size: size <= 50, 1, 40) == 40
    with pytest.raises(SystemExit, match="too short"):
        ruler.largest(lambda size: False, 4, None)

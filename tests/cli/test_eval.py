"""aurakv eval on a small random model: its rows are those of the library, and are measured once."""

import json
import shutil
import warnings
from pathlib import Path

import pytest

pytest.importorskip("rich", reason="rich is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import torch  # noqa: E402

from aurakv.calibration import guard  # noqa: E402
from aurakv.calibration.policy import LayerPolicy, Policy  # noqa: E402
from aurakv.cli import arguments, eval_plot  # noqa: E402
from aurakv.cli import eval as command  # noqa: E402
from aurakv.evaluation import builtin, compare, ids_of, rivals  # noqa: E402
from aurakv.evaluation.results import Results  # noqa: E402
from aurakv.hf import AuraCache  # noqa: E402

ARGS = ("--tokens", "200", "--threads", "1", "--device", "cpu")


def test_rows_are_those_of_compare(answer, small, tmp_path):
    got = answer("eval", "--model", small, *ARGS, "--formats", "k8v4,plain:k4v4")
    assert [row["name"] for row in got["rows"]] == ["uncompressed", "k8v4", "plain:k4v4"]
    model = transformers.AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32).eval()
    ids = ids_of(builtin(), transformers.AutoTokenizer.from_pretrained(small), model.config, 200)
    caches = {"k8v4": lambda: AuraCache(model.config, "k8v4"), "plain:k4v4": command.maker("plain:k4v4", model.config)}
    for row, expected in zip(got["rows"], compare(model, ids, caches, chunk=256), strict=True):
        assert row["kl"] == pytest.approx(expected.kl, rel=1e-3)
        assert row["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
        assert row["bytes_per_token"] == expected.bytes_per_token
    assert got["rows"][2]["tokens_from_codes"] == 200
    assert got["rows"][2]["reads_from_codes"] == 1
    assert got["model"] == small.name


def test_recent_tokens_of_formats_and_policies(answer, refused, small, tmp_path):
    policy = tmp_path / "policy.json"
    Policy(2, 16, (LayerPolicy("k4v4"),) * 2, first=1).save(policy)
    names = ["k4v4", "recent8:k4v4", f"recent3:{policy}", "recent8:plain:k4v4"]
    got = answer("eval", "--model", small, *ARGS, "--formats", ",".join(names))
    rows = {row["name"]: row for row in got["rows"]}
    assert rows["k4v4"]["kl"] > rows["recent8:k4v4"]["kl"]
    assert [rows[name]["tokens_from_codes"] for name in names] == [196, 188, 196, 192]
    assert "recentx:k4v4" in refused("eval", "--model", small, *ARGS, "--formats", "recentx:k4v4")


def test_how_codes_are_chosen(answer, small, tmp_path):
    """Fitted and nearest ones are different rows of one file, but of plain formats."""
    path, kl = tmp_path / "rows.json", {}
    for codes in ("fitted", "nearest", None):
        chosen = ["--codes", codes] if codes else []
        got = answer("eval", "--model", small, *ARGS, "--formats", "k3v3,plain:k3v3", "--resume", path, *chosen)
        kl[codes] = [row["kl"] for row in got["rows"][1:]]
    assert kl[None] == kl["fitted"]
    assert kl["nearest"][0] != kl["fitted"][0]
    assert kl["nearest"][1] == kl["fitted"][1]
    keys = [entry["key"] for entry in Results(path).entries]
    assert [(key["format"], key.get("codes")) for key in keys] == [
        ("uncompressed", None), ("k3v3", command.FITTED), ("plain:k3v3", None), ("k3v3", "nearest"),
    ]  # fmt: skip


def test_what_is_in_the_file_is_not_measured_again(answer, call, small, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    args = ("eval", "--model", small, *ARGS, "--resume", path)
    first = answer(*args, "--formats", "k4v4,k8v8")
    measured = []
    from aurakv import evaluation

    monkeypatch.setattr(evaluation, "compare", lambda *a, **k: measured.append(list(a[2])) or compare(*a, **k))
    again = answer(*args, "--formats", "k4v4,k3v3,k8v8")
    assert measured == [["k3v3"]]
    assert {row["name"]: row for row in first["rows"]}["k4v4"] in again["rows"]
    answer(*args[:3], "--tokens", "100", *ARGS[2:], "--resume", path, "--formats", "k4v4")
    assert measured == [["k3v3"], ["k4v4"]], "another number of tokens is another measurement"
    assert {entry["key"]["tokens"] for entry in Results(path).entries} == {100, 200}
    code, out, _ = call(*args, "--formats", "k4v4")
    assert code == 0
    assert "of reads)" in out


def test_rivals_needles_and_a_picture(answer, call, small, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    picture = tmp_path / "quality.png"
    text = tmp_path / "text.txt"
    text.write_text(builtin()[:3000])
    args = ("eval", "--model", small, *ARGS, "--text", text, "--formats", "k4v4,plain:k3v3", "--rivals", "--needle",
            "--lengths", "512,4K", "--resume", tmp_path / "rows.json", "--plot", picture)  # fmt: skip
    got = answer(*args)
    there = {name for name in rivals.names() if rivals.why_not(name) is None}
    assert {row["name"] for row in got["rows"]} == {"uncompressed", "k4v4", "plain:k3v3", *there}
    assert {row["text"] for row in got["rows"]} == {"text"}
    assert {row["tokens"] for row in got["needles"]} == {512}, "the text has no 4K tokens"
    assert len(got["needles"]) == 5 * len(got["rows"])
    assert picture.stat().st_size > 10_000
    code, out, err = call(*args)
    assert code == 0
    assert "needles in 512 tokens" in out
    assert "no needles at 4,096 tokens" in err


def test_kinds_and_means():
    names = {
        "k4v4": "format",
        "plain:k4v4": "plain",
        "recent8:k4v4": "recent",
        "turboquant_k8v4": "rival",
        "smollm2-135m": "policy",
    }
    assert {name: eval_plot.kind(name) for name in names} == names
    rows = [{"name": "a", "kl": 0.1, "bytes_per_token": 10}, {"name": "a", "kl": 0.3, "bytes_per_token": 12}]
    assert eval_plot.means([*rows, {"name": "uncompressed", "kl": 0, "bytes_per_token": 9}]) == {"a": (11, 0.2)}


def test_a_picture_compares_caches_on_the_same_texts():
    rows = [{"name": name, "text": text} for name, text in (("a", "x"), ("a", "y"), ("b", "y"))]
    assert eval_plot.shared(rows) == rows[1:]
    assert eval_plot.shared(rows[::2]) == rows[::2], "no text in common"


def test_a_policy_is_not_measured_silently_on_its_own_text(call, small, tmp_path, monkeypatch):
    from aurakv.calibration import policy

    monkeypatch.setattr(policy, "_FOLDER", tmp_path)
    monkeypatch.setattr(arguments, "POLICIES", tmp_path)
    Policy(2, 16, (LayerPolicy("k8v4"),) * 2).save(tmp_path / "pol.json")
    code, _, err = call("eval", "--model", small, *ARGS, "--formats", "k4v4,pol")
    assert code == 0
    assert "pol was made on the built-in text" in err


def test_the_wrong_entry_is_named(refused, small, tmp_path):
    """And nothing is said about entries before they are known to be right."""
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    options = ("eval", "--model", small, *ARGS, "--formats")
    assert "eval: k9v9 in --formats: bits must be one of" in refused(*options, "k4v4,k9v9")
    assert "eval: plain:k9v9 in --formats: bits must be one of" in refused(*options, "k4v4,plain:k9v9")
    assert "eval: smollm2-135m in --formats: this policy is for" in refused(*options, "k4v4,smollm2-135m")
    assert f"eval: {bad}: a policy is a JSON object" in refused(*options, f"k4v4,{bad}")
    said = refused(*options, "k4v4,smollm2-135")
    assert "eval: a format name is" in said
    assert "got 'smollm2-135'; a policy is a .json file or one of ['gemma-3-270m'" in said


def test_refusals(refused, small, tmp_path):
    model = ("--model", small, "--device", "cpu")
    assert "name each format once" in refused("eval", *model, "--formats", "k4v4,k4v4")
    assert "a format name is" in refused("eval", *model, "--formats", "q4")
    assert "cannot be read" in refused("eval", *model, "--text", tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_text("")
    assert "at least 2 tokens, got 0" in refused("eval", *model, "--text", tmp_path / "empty.txt")
    assert "must stay within" in refused("eval", *model, "--tokens", "32K")
    assert "must end with .png" in refused("eval", *model, "--plot", tmp_path / "x.bmp")
    assert "--lengths belongs to --needle" in refused("eval", *model, "--lengths", "1K")
    said = refused("eval", *model, "--resume", tmp_path / "none" / "x.json")
    assert "none must be a folder that exists, to save x.json in it" in said
    (tmp_path / "rows.json").write_text("{}")
    assert "must be a file of" in refused("eval", *model, "--resume", tmp_path / "rows.json")


@pytest.fixture
def measured(monkeypatch):
    """What is measured and not found in a file."""
    from aurakv import evaluation

    names: list[str] = []
    monkeypatch.setattr(evaluation, "compare", lambda *a, **k: names.extend(a[2]) or compare(*a, **k))
    return names


def rows_by_name(got):
    return {row["name"]: row for row in got["rows"]}


def test_a_changed_policy_is_measured_again(answer, small, tmp_path, measured):
    path, rows = tmp_path / "pol.json", tmp_path / "rows.json"
    args = ("eval", "--model", small, *ARGS, "--resume", rows, "--formats", f"{path},k4v4")
    first, second = (Policy(2, 16, (LayerPolicy(name),) * 2) for name in ("k2v2", "k8v8"))
    first.save(path)
    before = rows_by_name(answer(*args))
    second.save(path)
    after = rows_by_name(answer(*args))
    assert measured == [str(path), "k4v4", str(path)]
    assert after[str(path)]["bytes_per_token"] > before[str(path)]["bytes_per_token"]
    assert after["k4v4"] == before["k4v4"]
    assert after["uncompressed"] == before["uncompressed"]
    first.save(path)
    assert rows_by_name(answer(*args)) == before
    assert len(measured) == 3


def test_another_model_of_the_same_name_is_measured(answer, small, tmp_path, measured):
    other = tmp_path / "other" / small.name
    shutil.copytree(small, other)
    model = transformers.AutoModelForCausalLM.from_pretrained(small)
    with torch.no_grad():
        model.model.norm.weight[3] += 1
    model.save_pretrained(other)
    copied = tmp_path / "copied" / small.name
    shutil.copytree(small, copied)
    args = (*ARGS, "--resume", tmp_path / "rows.json", "--formats", "k4v4")
    first, changed, same = (rows_by_name(answer("eval", "--model", path, *args)) for path in (small, other, copied))
    assert measured == ["k4v4", "k4v4"]
    assert first == same
    assert first["uncompressed"]["perplexity"] != changed["uncompressed"]["perplexity"]


def test_rows_of_earlier_versions_count(answer, small, tmp_path, measured, monkeypatch):
    """Those of formats and shipped policies; a policy file of the same name may be another one by now."""
    from aurakv.calibration import policy

    path, rows = tmp_path / "pol.json", tmp_path / "rows.json"
    Policy(2, 16, (LayerPolicy("k8v4"),) * 2).save(path)
    monkeypatch.setattr(policy, "_FOLDER", tmp_path)
    monkeypatch.setattr(arguments, "POLICIES", tmp_path)
    assert "pol" in policy.shipped()
    args = ("eval", "--model", small, *ARGS, "--resume", rows, "--formats", f"k4v4,pol,{path}")
    before = answer(*args)["rows"]
    document = json.loads(rows.read_text())
    for entry in document["entries"]:
        assert entry["key"].pop("weights")
        entry["key"].pop("policy", None)
    rows.write_text(json.dumps(document))
    measured.clear()
    after = answer(*args)["rows"]
    assert measured == [str(path)]
    assert after[:3] == before[:3]
    assert len(Results(rows).entries) == 4, "the new row of the policy file has replaced the old one"
    Policy(2, 16, (LayerPolicy("k3v3"),) * 2).save(path)
    document["entries"] = json.loads(rows.read_text())["entries"]
    for entry in document["entries"]:  # a row that says which policy it is of must agree
        if entry["key"]["format"] == "pol":
            entry["key"] |= {"weights": Results(rows).entries[-1]["key"]["weights"], "policy": "another"}
    rows.write_text(json.dumps(document))
    measured.clear()
    answer(*args)
    assert measured == ["pol", str(path)]


@pytest.mark.parametrize(
    "policy",
    ["smollm2-135m", "smollm2-135m-k3v3", "smollm2-135m-k3v2", "gemma-3-270m", "gemma-3-270m-k3v3"],
)
def test_committed_results_are_used(policy):
    """What `make eval-quality` asks for is in the committed files: rows of the policies that come with the package, and
    rows without marks whatever the weights are called."""
    folder = Path(__file__).parents[2] / "benchmarks" / "baselines"
    results = Results(folder / f"quality-{'smollm2' if policy.startswith('smollm2') else 'gemma3'}.json")
    mark = {"weights": next(e["key"]["weights"] for e in results.entries if e["key"]["format"] == policy)}
    names = [policy, "plain:k4v4", "k4v4"]
    marks = command.marks_of(names, {policy: Policy.load(policy)}, torch.device("cpu"))
    work = command.Work(None, None, None, results, dict.fromkeys(names), mark, marks)
    fields = ("kind", "model", "dtype", "text", "ids", "tokens", "every")
    shared = {name: results.entries[0]["key"][name] for name in fields}
    for name, key in work._keys(shared, "uncompressed").items():
        assert work._find(key)["tokens"] == 4096
        assert (work._find({**key, "weights": "x"}) is None) == (name in (policy, "k4v4"))
    assert work._find({**work._keys(shared, "uncompressed")[policy], "policy": "another"}) is None
    assert work._find({**work._keys(shared, "uncompressed")[policy], "format": "my.json"}) is None


def test_a_row_that_fails_does_not_end_the_others(call, small, tmp_path, monkeypatch):
    """The rows before and behind it are measured and saved, and the failed one is measured when the command goes on."""
    whole = AuraCache.update

    def update(self, *args, **options):
        if self.formats[0].startswith("k8v4") and broken:
            raise ZeroDivisionError("built by somebody else")
        return whole(self, *args, **options)

    broken, path = [True], tmp_path / "rows.json"
    monkeypatch.setattr(AuraCache, "update", update)
    monkeypatch.setattr(AuraCache, "formats", property(lambda self: [str(f) for f in made[id(self)]]), raising=False)
    made = {}
    start = AuraCache.__init__

    def init(self, config, name=None, **options):
        made[id(self)] = [name]
        start(self, config, name, **options)

    monkeypatch.setattr(AuraCache, "__init__", init)
    args = ("eval", "--model", small, *ARGS, "--resume", path, "--formats", "k4v4,k8v4,k8v8")
    code, out, err = call(*args, "--json")
    assert code == 2
    found = json.loads(out)
    assert [row["name"] for row in found["rows"]] == ["uncompressed", "k4v4", "k8v8"]
    label = "alice (built in): k8v4"
    assert found["failed"] == {label: "ZeroDivisionError: built by somebody else"}
    assert f"{label} failed: ZeroDivisionError: built by somebody else" in err
    assert err.splitlines()[-1].startswith("aurakv eval: 1 row could not be measured: alice (built in): k8v4: Zero")
    assert {entry["key"]["format"] for entry in Results(path).entries} == {"uncompressed", "k4v4", "k8v8"}
    broken.clear()
    code, out, _ = call(*args, "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)["rows"]] == ["uncompressed", "k4v4", "k8v4", "k8v8"]


def test_rows_are_saved_one_by_one(call, small, tmp_path, monkeypatch):
    saved = []
    whole = Results.save
    monkeypatch.setattr(Results, "save", lambda self: (saved.append(len(self.entries)), whole(self)))
    code, _, err = call("eval", "--model", small, *ARGS, "--resume", tmp_path / "rows.json", "--formats", "k4v4,k8v8")
    assert code == 0
    assert saved == [2, 3], "the uncompressed model and a row, then another row"
    lines = [line for line in err.splitlines() if "measured in" in line]
    assert [line.rpartition(":")[0] for line in lines] == ["alice (built in): k4v4", "alice (built in): k8v8"]


def test_warnings_name_their_row(call, small, monkeypatch):
    whole = AuraCache.update

    def update(self, *args, **options):
        warnings.warn("keys do not survive k4v4 in layer 0", stacklevel=2)
        return whole(self, *args, **options)

    monkeypatch.setattr(AuraCache, "update", update)
    _, _, err = call("eval", "--model", small, *ARGS, "--formats", "k4v4,plain:k4v4")
    said = [line for line in err.splitlines() if "survive" in line]
    assert [line.partition(": keys")[0] for line in said] == ["alice (built in): k4v4", "alice (built in): plain:k4v4"]


def test_the_uncompressed_model_runs_once_for_all_rows(answer, small, monkeypatch):
    runs = []
    whole = transformers.DynamicCache.__init__
    monkeypatch.setattr(transformers.DynamicCache, "__init__", lambda self, **k: (runs.append(1), whole(self, **k))[1])
    args = ("eval", "--model", small, *ARGS, "--formats", "k4v4,k8v8,k8v4")
    first = answer(*args)["rows"]
    assert len(runs) == 1
    monkeypatch.setattr("aurakv.evaluation.measure.HELD", 0)
    again = answer(*args)["rows"]
    assert len(runs) == 4, "what it predicts is too much to be held"
    drop = {"seconds": 0}
    assert [{**row, **drop} for row in first] == [{**row, **drop} for row in again]


@pytest.mark.parametrize(("nats", "said"), [(0.2504, "0.2504"), (0.75, "0.75"), (0.2500001, "0.2500001"), (3.2, "3.2")])
def test_a_number_can_be_told_from_its_limit(nats, said):
    assert guard.more_than(nats, 0.25) == said

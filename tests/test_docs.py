"""The documents are true: their Python runs, and docs/format.md alone is enough to read what the library writes."""

import ast
import hashlib
import importlib.util
import json
import re
import struct
from pathlib import Path

import pytest
import safetensors
import torch

import aurakv
from aurakv.errors import InputError
from aurakv.format import fit as fitting
from aurakv.format import levels as level_tables
from aurakv.format import rotation
from aurakv.format.packing import pack
from aurakv.storage.uncompressed import Uncompressed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FORMAT = DOCS / "format.md"
DOCUMENTS = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(DOCS.rglob("*.md"))]
USER_PAGES = ("transformers", "serving", "quality", "cpu", "gpu", "apple", "parallel")
CPU = torch.device("cpu")


def fences(path):
    """(info string, text, line) of each fenced block."""
    text = path.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(block[1], block[2], text[: block.start(2)].count("\n")) for block in blocks]


def execute(path):
    """Run the runnable blocks of a document in order, as one program; what it defined."""
    names = {"__name__": path.stem}
    for info, code, line in fences(path):
        if info == "python runnable":
            exec(compile("\n" * line + code, str(path), "exec"), names)  # errors name the line of the document
    return names


def table(path, *header):
    """The rows of the Markdown table with this header, without back quotes."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    wanted = "| " + " | ".join(header) + " |"
    assert any(line == wanted for line in lines), f"{path.name} has no table {wanted}"
    next(lines)  # the rule
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def example():
    """The cache of the worked example, made by the library. Its padding is 0."""
    names = execute(FORMAT)
    pool = aurakv.PagePool(aurakv.Format.parse("k4v3", 16), num_pages=1, page_size=2, kv_heads=1)
    pool.data.zero_()
    cache = aurakv.KVCache.paged(pool, seqs=1)
    k, v = (torch.tensor(names[name], dtype=torch.float32)[:, None] for name in ("keys", "values"))
    cache.append(k, v, [0, 2])
    return names, cache, k


@pytest.fixture(scope="module")
def document():
    """What docs/format.md defines."""
    return execute(FORMAT)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_in_documents_runs(path, tmp_path, monkeypatch):
    if path.name == "transformers.md":
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    execute(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_in_documents_says_whether_it_runs(path):
    for info, _, line in fences(path):
        if info.split()[:1] == ["python"]:
            allowed = ("python runnable", "python fragment")
            assert info in allowed, f"{path.name}:{line}: a Python block is one of {allowed}, got {info!r}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_inside_the_repository_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", path.read_text(encoding="utf-8")):
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name} links to {target}, which is not there"
        if anchor:
            assert anchor[1:] in headings(file), f"{path.name} links to {target}{anchor}, which is not there"


def headings(path):
    """The anchors of a page, as GitHub and MkDocs both make them from headings of words, digits, dots and hyphens."""
    lines = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line).strip().lower().replace(" ", "-") for line in lines}


def test_the_site_lists_every_page():
    listed = re.findall(r"([\w/-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    outside = ["index.md", "contributing.md", "changelog.md"]  # made of README.md, CONTRIBUTING.md and CHANGELOG.md
    assert sorted(listed) == sorted([*outside, *(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))])


@pytest.mark.parametrize("name", USER_PAGES)
def test_user_pages_are_short(name):
    words = len((DOCS / f"{name}.md").read_text(encoding="utf-8").replace("|", " ").split())  # not the lines of tables
    assert words <= 1100, f"{name}.md has {words} words: measurements and experiments go to docs/lab"


def test_a_built_site_is_checked(tmp_path):
    spec = importlib.util.spec_from_file_location("check_site", ROOT / "tools" / "check_site.py")
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1> <a href="https://example.org">other hosts may be named</a>')
    good = '<a href="b.html#there">b</a> <a href="#here" id="here">here</a> <img src="data:image/png;base64,AA">'
    (tmp_path / "a.html").write_text(good)
    assert check.problems(tmp_path) == []
    bad = '<a href="c.html">c</a> <a href="b.html#gone">b</a> <script src="https://example.org/x.js"></script>'
    (tmp_path / "a.html").write_text(bad)
    assert check.problems(tmp_path) == [
        "a.html fetches https://example.org/x.js",
        "a.html links to b.html#gone, which has no such anchor",
        "a.html links to c.html, which is not there",
    ]


@pytest.mark.parametrize(("dim", "bits"), [(16, 4), (48, 3), (32, 2)])
def test_fitted_codes(document, dim, bits):
    generator = torch.Generator().manual_seed(dim)
    codec = aurakv.Codec.key(dim, bits, dtype=torch.float32)
    weight, x = torch.rand(1, dim, generator=generator) ** 3 + 0.01, torch.randn(8, 1, dim, generator=generator)
    lower, cost = document["split"](weight[0].tolist(), dim)
    fit = fitting.fit(codec, weight)
    found = fitting.split(fit, dim, torch.float64)
    torch.testing.assert_close(found[0][0], torch.tensor(lower, dtype=torch.float64), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found[1][0], torch.tensor(cost, dtype=torch.float64), rtol=1e-3, atol=1e-6)
    codes = aurakv.encode(x, codec, fit=fit)
    same = 0
    for row, data, scale in zip(
        codec.rotate(x.double())[:, 0].tolist(), codes.data[:, 0], codes.scale[:, 0], strict=True
    ):
        a, d = found[0][0].tolist(), found[1][0].tolist()
        expected, stored = document["fitted"](row, a, d, document["levels"]("int8", bits))
        if document["unpack"](bytes(data.tolist()), bits) == expected:
            same += 1
            assert float(scale) == pytest.approx(stored, rel=1e-5)
    assert same >= 7  # rounding may turn a code at a boundary, and those after it


def test_signs(document):
    for dim, seed in ((16, 0), (1024, 1), (80, 7), (576, 2**64 - 1)):
        assert document["signs"](dim, seed) == rotation.signs(dim, seed)


def test_hadamard_of_every_order(document):
    listed = re.search(r"These are ([\d, \n]+) and (\d+)", FORMAT.read_text(encoding="utf-8"))
    dims = [int(number) for number in re.findall(r"\d+", listed[0])]
    assert dims == [dim for dim in range(1, 2000) if _rotates(dim)]
    for dim in dims:
        assert document["hadamard"](dim) == rotation.hadamard(dim).tolist()


def _rotates(dim):
    try:
        rotation.base_order(dim)
    except InputError:
        return False
    return True


def test_level_tables(document):
    existing = [(name, bits) for name in level_tables.TABLES for bits in level_tables.CODE_BITS if _exists(name, bits)]
    rows = table(FORMAT, "table", "bits", "MSE", "SHA-256")
    assert [(name, int(bits)) for name, bits, _, _ in rows] == existing
    for name, bits, mse, digest in rows:
        levels = level_tables.table(name, int(bits))
        assert f"{level_tables.mse(levels):.6g}" == mse
        assert hashlib.sha256(struct.pack(f"<{len(levels)}f", *levels)).hexdigest()[:16] == digest
        assert document["levels"](name, int(bits)) == list(levels)


def _exists(name, bits):
    try:
        level_tables.table(name, bits)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("bits", level_tables.CODE_BITS)
def test_packing(document, bits):
    codes = torch.randint(2**bits, (48,), generator=torch.Generator().manual_seed(bits))
    assert document["unpack"](bytes(pack(codes, bits).tolist()), bits) == codes.tolist()


def test_layout(document):
    for name, dims, page_size in (("k4v4", (128, 128), 64), ("k3:f32/v16", (80, 64), 7), ("k16:f32/v5", (20, 48), 1)):
        format = aurakv.Format.parse(name, dims)
        sizes = (format.key.row_bytes, format.key.scale_bytes, format.value.row_bytes, format.value.scale_bytes)
        assert document["layout"](page_size, *sizes) == list(format.layout(page_size))


def test_names():
    rows = table(FORMAT, "printed", "full")
    assert rows
    for printed, full in rows:
        format = aurakv.Format.parse(full, 128)
        assert (format.name, f"k{format.key.name}/v{format.value.name}") == (printed, full)
        assert aurakv.Format.parse(printed, 128) == format


def test_worked_example_bytes():
    names, cache, k = example()
    assert bytes(cache.pool.data.flatten().tolist()) == names["page"]
    key = cache.format.key
    assert key.rotate(k[0, 0]).tolist() == names["y"]
    levels = key.level_tensor(torch.float64, CPU)[names["codes"]]
    exact = torch.tensor(names["y"], dtype=torch.float64).norm() / levels.norm()
    prose = " ".join(FORMAT.read_text(encoding="utf-8").split())
    assert f"levels[codes]‖ = {exact:.6f}`, in float16 {names['key_scales'][0]}," in prose


def test_worked_example_decodes():
    names, cache, _ = example()
    for ours, theirs in zip(cache.decode(0, torch.float64), ("decoded_keys", "decoded_values"), strict=True):
        torch.testing.assert_close(ours[:, 0], torch.tensor(names[theirs], dtype=torch.float64))


def test_worked_example_in_a_file(tmp_path):
    _, cache, _ = example()
    aurakv.save(cache, tmp_path / "cache.safetensors")
    with safetensors.safe_open(tmp_path / "cache.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (manifest,) = (json.loads(text) for info, text, _ in fences(FORMAT) if info == "json manifest")
    assert {name: json.loads(text) for name, text in metadata.items()} == {"aurakv": manifest}
    assert torch.equal(tensors.pop("pages"), cache.pool.data)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"lengths": [2], "table": [[0]]}
    fields = {name: value for name, value in manifest.items() if name != "checksum"}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == manifest["checksum"]
    documented = [name for cell, _ in table(FORMAT, "field", "meaning") for name in re.findall(r"\w+", cell)]
    assert set(manifest) <= set(documented)
    assert set(documented) - set(manifest) == {"window", "sinks", "chunk", "rollback"}


def test_every_tensor_and_field_of_a_file_is_documented(tmp_path):
    constant = {"key_offset": torch.ones(1, 16), "value_offset": torch.ones(1, 16)}
    constant |= {"key_fit": fitting.equal(1), "value_fit": fitting.equal(1)}
    format = aurakv.Format.parse("k4v3", 16)
    ring = aurakv.KVCache.ring(format, 1, 1, window=4, sinks=1, uncompressed=Uncompressed(2, 3), **constant)
    ring.append(torch.ones(9, 1, 16), torch.ones(9, 1, 16), [0, 9])
    aurakv.save(ring, tmp_path / "ring.safetensors")
    with safetensors.safe_open(tmp_path / "ring.safetensors", "pt") as file:
        tensors, manifest = set(file.keys()), json.loads(file.metadata()["aurakv"])
    rows = table(FORMAT, "tensor", "dtype, shape", "contents")
    assert tensors == {name for row in rows for name in re.findall(r"\w+", row[0])}
    rows = table(FORMAT, "field", "meaning")
    assert {*manifest, "max_width"} == {name for row in rows for name in re.findall(r"\w+", row[0])}


def sentences_of(folder):
    """Messages in the code as lists of texts, with None where a value is put in."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append([node.value])
            elif isinstance(node, ast.JoinedStr):
                found.append([part.value if isinstance(part, ast.Constant) else None for part in node.values])
    return found


def says(message, sentence):
    """Whether a sentence is what a message begins with, of which some text must be the message's own."""
    pattern, own = "", 0
    for part in message:
        if part is None:
            pattern += ".+"
            if own > 12 and re.fullmatch(pattern, sentence):
                return True
            continue
        text = part.removeprefix("aurakv cannot serve this: ")
        for end in range(len(sentence)):  # where it ends inside of this text
            rest = sentence[end:]
            if own + len(rest) > 12 and text.startswith(rest) and re.fullmatch(pattern, sentence[:end]):
                return True
        pattern, own = pattern + re.escape(text), own + len(text)
    return False


def test_refusals_of_vllm_are_those_of_the_code():
    """Every sentence in the table of docs/serving.md is one that the plugin says, and all that are about models and
    options are there."""
    messages = sentences_of(ROOT / "src/aurakv/vllm") + sentences_of(ROOT / "src/aurakv/calibration")
    rows = re.findall(r"^\|.*\| refused: (.*?) \| (?:not tried )?\|$", (DOCS / "serving.md").read_text("utf-8"), re.M)
    sentences = [each for row in rows for each in row.split("; ")]
    assert len(sentences) > 15
    unknown = [each for each in sentences if not any(says(message, each) for message in messages)]
    assert not unknown
    tree = ast.parse((ROOT / "src/aurakv/vllm/adapter.py").read_text("utf-8"))
    why_not = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "why_not")
    checks = next(
        node.value
        for node in why_not.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "checks"
    )
    for check in checks.elts:
        text = check.elts[1].value if isinstance(check.elts[1], ast.Constant) else check.elts[1].values[0].value
        assert any(each.startswith(text.split(",")[0].rstrip()) for each in sentences), text


METAL = re.compile(r"backends/metal|Metal (backend|kernels)|metal chosen|-m mps|--device mps")
UNTRIED = "emulated on Linux; not yet run on an Apple GPU"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name != "roots.md"], ids=lambda path: path.name)
def test_who_speaks_of_the_metal_backend_says_that_no_apple_gpu_has_run_it(path):
    """In the same paragraph, item or row; a page about it says so first. roots.md has kernels of others."""
    text = path.read_text(encoding="utf-8")
    if path.name in ("apple.md", "metal.md"):
        assert UNTRIED.lower() in " ".join(text.split("\n\n", 3)[1:3]).replace("\n", " ").lower()
        return
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s)", text):
        assert not METAL.search(part) or UNTRIED in " ".join(part.split()), part

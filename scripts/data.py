"""Long documents as training rows: text files, or the source of the Python standard library on this machine.

1. A document is a text file, or one package of the standard library (asyncio, email, xml, ...): the text of all its .py
   files, joined. Most packages are tens of thousands of tokens long, and nothing has to be downloaded.
2. In the standard library comments and docstrings are no targets (label -100), as a prompt would be none. So the number
   of targets differs from row to row and from one part of a row to the next: a wrong loss average would show.
3. A document is cut into the fewest rows of (nearly) equal length that are not longer than max_length; nothing is
   thrown away but rows without any target, and row lengths are odd as often as even.
"""

import ast
import io
import math
import sysconfig
import tokenize
import warnings
from itertools import chain, pairwise, repeat
from pathlib import Path

from transformers import PreTrainedTokenizerBase

# Tables and generated text rather than code, or not on every machine.
SKIPPED_PACKAGES = {"encodings", "idlelib", "lib2to3", "pydoc_data", "test"}


def training_rows(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    text_files: list[str] | None = None,
    max_rows: int | None = None,
    min_rows_per_document: int = 1,
) -> list[dict[str, list[int]]]:
    """
    Makes tokenized rows of long documents: the first row of every document, then the second of every document, ...

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A fast tokenizer (its character offsets are needed).
        max_length (`int`):
            Length of the longest row in tokens.
        text_files (`list[str]`, *optional*):
            One document each. Defaults to the packages of the standard library.
        max_rows (`int`, *optional*):
            Stop after so many rows.
        min_rows_per_document (`int`, *optional*, defaults to `1`):
            Shorter documents are left out. With 5, no row is shorter than `4/5 * max_length`.

    Returns:
        `list[dict[str, list[int]]]`: rows with `"input_ids"` and `"labels"`.
    """
    if text_files:
        documents = {path: (Path(path).read_text(encoding="utf-8"), []) for path in text_files}
    else:
        documents = standard_library_documents()

    numbered_rows = []
    for text, skipped_spans in documents.values():
        input_ids, labels = tokenize_with_labels(tokenizer, text, skipped_spans)
        n_rows = math.ceil(len(input_ids) / max_length)
        if n_rows < min_rows_per_document:
            continue
        cuts = [index * len(input_ids) // n_rows for index in range(n_rows + 1)]
        numbered_rows += [
            (number, {"input_ids": input_ids[start:end], "labels": labels[start:end]})
            for number, (start, end) in enumerate(pairwise(cuts))
            if any(label != -100 for label in labels[start + 1 : end])  # a row's first token is nobody's target
        ]
    numbered_rows.sort(key=lambda numbered_row: numbered_row[0])
    return [row for _, row in numbered_rows[:max_rows]]


def standard_library_documents() -> dict[str, tuple[str, list[tuple[int, int]]]]:
    """Reads the packages of the standard library: name -> text, and the spans of its comments and docstrings in it."""
    documents = {}
    for init_file in sorted(Path(sysconfig.get_path("stdlib")).glob("*/__init__.py")):
        package = init_file.parent
        if package.name in SKIPPED_PACKAGES:
            continue
        text, spans = "", []
        for path in sorted(package.rglob("*.py")):
            source = path.read_text(encoding="utf-8", errors="replace")
            spans += [(start + len(text), end + len(text)) for start, end in comment_and_docstring_spans(source)]
            text += source
        documents[package.name] = text, spans
    return documents


def comment_and_docstring_spans(source: str) -> list[tuple[int, int]]:
    """Finds comments and docstrings in Python source, as sorted character spans; none if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (SyntaxError, tokenize.TokenError):
        return []

    lines = source.split("\n")
    line_starts = [0]
    for line in lines:
        line_starts.append(line_starts[-1] + len(line) + 1)

    def position(line_number: int, byte_column: int) -> int:  # ast counts columns in UTF-8 bytes, and lines from 1
        line = lines[line_number - 1].encode()
        return line_starts[line_number - 1] + len(line[:byte_column].decode())

    spans = [
        (line_starts[token.start[0] - 1] + token.start[1], line_starts[token.end[0] - 1] + token.end[1])
        for token in tokens
        if token.type == tokenize.COMMENT
    ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        match node.body:
            case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                start = position(docstring.lineno, docstring.col_offset)
                spans.append((start, position(docstring.end_lineno, docstring.end_col_offset)))
    return sorted(spans)


def tokenize_with_labels(
    tokenizer: PreTrainedTokenizerBase, text: str, skipped_spans: list[tuple[int, int]]
) -> tuple[list[int], list[int]]:
    """Tokenizes a text; labels are the input ids, but -100 for every token that touches one of the sorted spans."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    labels = list(encoded["input_ids"])
    spans = chain(skipped_spans, repeat((math.inf, math.inf)))
    span_start, span_end = next(spans)
    for index, (start, end) in enumerate(encoded["offset_mapping"]):
        while span_end <= start:
            span_start, span_end = next(spans)
        if end > span_start:
            labels[index] = -100
    return encoded["input_ids"], labels

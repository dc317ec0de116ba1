"""Shell scripts are read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.errors import SpecError
from planner.export.followed.shell_script import read_shell

TABLES = yaml.safe_load((Path(__file__).parent / "shell_words.yaml").read_text())


@pytest.mark.parametrize(("text", "words"), TABLES["scripts"])
def test_words_of_a_script(text: str, words: list[str]) -> None:
    assert read_shell(text).words == words


def test_nothing_is_run(tmp_path: Path) -> None:
    read_shell(f"touch {tmp_path}/a; A=$(touch {tmp_path}/b); $((__import__('os').mkdir('{tmp_path}/c')))")
    assert not list(tmp_path.iterdir())


def test_files_that_a_script_sources_and_writes() -> None:
    texts = {"conf.sh": "LAYERS=7"}
    script = read_shell(
        'source $DIR/conf.sh\ncat <<EOF > ds.json\n{"a": $LAYERS}\nEOF\nrun --n $LAYERS', lambda n: texts.get(n[1:])
    )
    assert script.words == ["run", "--n", "7"]
    assert script.files == {"ds.json": '{"a": 7}\n'}


def test_variables_that_double_themselves() -> None:
    with pytest.raises(SpecError, match="variables of the script make more than 4,000,000 characters"):
        read_shell("A=aaaaaaaa\n" + "A=$A$A\n" * 40)

"""Shell scripts are read and never run."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import SpecError
from planner.export.followed.shell_script import read_shell


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run 'a b' c\\ d", ["run", "a b", "c d"]),
        ("A=1\nrun $A ${A} ${B:-2} ${B}x", ["run", "1", "1", "2", "x"]),
        ('A=(x "y z")\nrun "${A[@]}" ${A[@]}', ["run", "x", "y z", "x", "y", "z"]),
        ("A='--a 1'\nA+=' --b'\nrun $A", ["run", "--a", "1", "--b"]),
        ("N=$((2 * (3 + 1)))\nrun $N", ["run", "8"]),
        ("export A=4 B=5; run $A$B", ["run", "45"]),
        ("run $(rm -rf /) `whoami` x # comment", ["run", "x"]),
        ("run --a \\\n  --b", ["run", "--a", "--b"]),
        ("bash -c \"torchrun --nnodes 2 x.py --a 'b c'\"", ["torchrun", "--nnodes", "2", "x.py", "--a", "b c"]),
        ("run ${A", ["run"]),
        ("run 'never closed", ["run", "never closed"]),
        ("N=$((1/0)); run ${N}", ["run"]),
        ("f() { run $1 --x \"$@\"; }\nf 3 'a b'", ["run", "3", "--x", "3", "a b"]),
        ("case $A in a) run a;; *) run --b;; esac", ["run", "--b"]),
        ("if [[ 3 -gt 2 && -z $X ]]; then run --y; else run --n; fi", ["run", "--y"]),
        ("if [ -f /etc/x ]; then run --y; else run --n; fi", ["run", "--n"]),
        ("echo --no 1 2 3\nrun --yes", ["run", "--yes"]),
        ("cat <<EOT > f\n--no {\n$A\nEOT\nrun --z", ["run", "--z"]),
        ("A=( # c\n --a 1 # x y\n --b\n)\nrun ${A[@]} 2>&1 | tee x", ["run", "--a", "1", "--b"]),
        ("A=x_y.sh\nrun ${A%.sh} ${A#*_} ${A/x/z} ${A^^}", ["run", "x_y", "y.sh", "z_y.sh", "X_Y.SH"]),
        ("for i in {1..3}; do A+=$i; done; run $A", ["run", "123"]),
        ("for ((i=0; i<4; i++)); do A+=($i); done; run ${A[@]}", ["run", "0", "1", "2", "3"]),
        ("((i = 2)); (( i += 3 )); run $i", ["run", "5"]),
        ('A=(0 1 1)\nprintf -v F "[%s]" "$(IFS=\', \'; echo "${A[*]}")"\nrun $F', ["run", "[0,1,1]"]),
        ('run "$(printf "%s_%s" a b)" $(seq 2 2 6)', ["run", "a_b", "2", "4", "6"]),
        ("N=$(($(nproc) / 2)); run --n ${N:-8}", ["run", "--n", "8"]),
        ("eval \"run --a 'b c'\"", ["run", "--a", "b c"]),
        ("CMD='run --a $SLURM_NNODES'\nsrun -N 4 bash -c \"$CMD\"", ["srun", "-N", "4", "run", "--a"]),
        ("bash -c 'run \"$@\"' bash --a 1", ["run", "--a", "1"]),
    ],
)
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

"""Reading a bash launch script: the words that bash would pass to its training command, without executing anything."""

import os

import pytest

from slime_tis.trainer.cli.launch_script import END, OUTPUT, UNSET, read_launch


@pytest.fixture
def script(tmp_path):
    """Writes run.sh and returns its path."""

    def write(text, name="run.sh"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def words_of(path):
    return list(read_launch(path).words)


# (script, words after train.py)
SCRIPTS = {
    "plain": ("python3 train.py --lr 1e-6 --use-tis", "--lr 1e-6 --use-tis"),
    "array": ('A=(\n  --lr 1e-6  # rate\n  #--seed 1\n  --x "a b"\n)\npython train.py ${A[@]}', "--lr 1e-6 --x a b"),
    "quoted array": ('A=(--x "a b")\npython train.py "${A[@]}" --y', ["--x", "a b", "--y"]),
    "append": ("A=(--a)\nA+=(--b 1)\npython train.py ${A[@]}", "--a --b 1"),
    "empty array": ("A=(\n # --x\n)\npython train.py ${A[@]} --y", "--y"),
    "unset array": ('python train.py --x ${A[@]} "${A[@]}" "${EVAL_ARGS}" $EVAL_ARGS --y', "--x --y"),
    "first of an array": ("A=(1 2)\npython train.py --a $A", "--a 1"),
    "variables": ("M=/m\nexport N=${M}/n\npython train.py --a $M \"${N}.x\" '$M'", "--a /m /m/n.x $M"),
    "defaults": ('python train.py --a ${A:-1} "${B:-x y}" ${C:-} ${D:+2}', ["--a", "1", "x y"]),
    "unset": ("python train.py --key ${KEY}/x", ["--key", f"{UNSET}KEY{END}/x"]),
    "output": ("python train.py --n $(nproc --all) `id -u` $((1+2)) ${#X}", ["--n", *[OUTPUT] * 4]),
    "ray": (
        'R="{\n  \\"env\\": \\"$(id)\\"\n}"\nray job submit --env="${R}" \\\n -- python3 train.py \\\n --a 1',
        "--a 1",
    ),
    "redirected": ("nohup python train.py --a 1 > log.txt 2>&1 &", "--a 1"),
    "piped": ("python train.py --a 2>&1 1 | tee log && echo done", "--a 1"),
    "shell": ('bash -c "python train.py --a 1"', "--a 1"),
    "comment": ("# python train.py --old\npython train.py --a '#no' # yes", "--a #no"),
    "here-document": ("cat <<'EOF' > x\npython train.py --wrong 'open\nEOF\npython train.py --a 1", "--a 1"),
    "subshell": ("(cd /x && python train.py --a 1)", "--a 1"),
    "empty quotes": ("python train.py --a '' \"\"", ["--a", "", ""]),
    "condition": ("N=2\nif true; then N=3; fi\npython train.py --n $N", "--n 2"),
    "crlf": ("A=(--a 1)\r\npython train.py ${A[@]}\r\n", "--a 1"),
    "environment": ("CUDA=1 python /root/slime/train.py --a", "--a"),
    "case": ('case $X in\n  a) Y=1 ;;\n  *) Y=2 ;;\nesac\npython train.py --a "1 \\" 2"', ["--a", '1 " 2']),
    "loop": ("for ((i=0; i<3; i++)); do B+=($i); done\npython train.py --a", "--a"),
    "several variables in a word": (
        "H=h P=1\nA=(--u http://$H:$P/g)\npython train.py ${A[@]} x$H:$P",
        "--u http://h:1/g xh:1",
    ),
    "the last of two": ("python train.py --a\npython train.py --b", "--b"),
}


@pytest.mark.parametrize(("text", "words"), SCRIPTS.values(), ids=SCRIPTS)
def test_words_of_the_training_command(script, text, words):
    assert words_of(script(text)) == (words.split(" ") if isinstance(words, str) else words)


def test_notes_name_the_doubtful_variables_that_reach_the_command(script):
    launch = read_launch(
        script(
            'FOUND=$(nvidia-smi -L | wc -l)\nN=${N:-${FOUND}}\nif [ -z "$N" ]; then\n  N=8\nfi\nM=x$N\n'
            "if x; then OTHER=1; fi\nray start --n $OTHER\nE=(${X[@]})\npython train_async.py --n $M $EVAL_ARGS"
        )
    )
    assert (launch.program, launch.words) == ("train_async.py", ("--n", "x8"))
    assert [note.split()[0] for note in launch.notes] == ["N", "EVAL_ARGS"]


def test_sourced_files_are_found_where_slime_keeps_them(script):
    script("MODEL_ARGS=(--layers ${LAYERS:-36})", "models/m.sh")
    script('LAYERS=5 source "$(dirname -- "${BASH_SOURCE[0]}")/m.sh"', "models/small.sh")
    here = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    for name in ('"${DIR}/models/m.sh"', "/root/slime/scripts/models/m.sh", '"$UNSET/models/m.sh"'):
        assert words_of(script(f"{here}source {name}\npython train.py ${{MODEL_ARGS[@]}}")) == ["--layers", "36"]
    assert words_of(script(". models/small.sh\npython train.py ${MODEL_ARGS[@]}")) == ["--layers", "5"]
    up = 'ROOT="$(cd -- "$(dirname "$0")/.." && pwd)"\nsource $ROOT/models/m.sh\npython train.py ${MODEL_ARGS[@]}'
    assert words_of(script(up, "deeper/run.sh")) == ["--layers", "36"]


def test_a_missing_sourced_file_is_noted(script):
    launch = read_launch(script("source $X/none.sh\npython train.py ${MODEL_ARGS[@]} --a"))
    assert launch.words == ("--a",)
    assert "'${X}/none.sh'" in launch.notes[0] and "MODEL_ARGS" in launch.notes[1]


@pytest.mark.parametrize(
    "line",
    [
        'R="{\\"PYTHONPATH\\": \\"/root/Megatron-LM/:${D}:/root/slime\\"}"',
        'cat <<EOF\n{"PYTHONPATH": "/root/Megatron-LM:/x:/root/slime"}\nEOF',
        'export PYTHONPATH="${D}:/root/slime:$PYTHONPATH"  # PYTHONPATH=/no',
        "PYTHONPATH=/x:/root/slime ls",
    ],
    ids=["runtime environment", "here-document", "export", "prefix"],
)
def test_pythonpath(script, line):
    launch = read_launch(script(f"D=/x\n{line}\n# PYTHONPATH=/old\npython train.py --a"))
    assert launch.python_path == ("/x", "/root/slime")


REFUSED = {
    "an open quote": ("echo\necho 'open\npython train.py", "line 2 and what follows it are not understood"),
    "no training": ("echo hello", "no command that runs train.py"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_unreadable_scripts_are_refused(script, text, message):
    with pytest.raises(ValueError) as refusal:
        read_launch(script(text))
    assert message in str(refusal.value)


def test_other_files_are_refused(script, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a file"):
        read_launch(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a Python program"):
        read_launch(script("U.execute_train('--lr 1')", "run.py"))

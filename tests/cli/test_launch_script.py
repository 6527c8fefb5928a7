"""Reading a bash launch script: what bash would make of its training command, as far as that needs no execution."""

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
    "plain": ("python3 train.py --lr 1e-6 --use-tis", ["--lr", "1e-6", "--use-tis"]),
    "array": ('A=(\n  --lr 1e-6  # rate\n  #--seed 1\n  --x "a b"\n)\npython train.py ${A[@]}', None),
    "quoted array": ('A=(--x "a b")\npython train.py "${A[@]}" --y', ["--x", "a b", "--y"]),
    "append": ("A=(--a)\nA+=(--b 1)\npython train.py ${A[@]}", ["--a", "--b", "1"]),
    "empty array": ("A=(\n # --x\n)\npython train.py ${A[@]} --y", ["--y"]),
    "variables": ("M=/m\nexport N=${M}/n\npython train.py --a $M --b \"${N}.x\" --c '$M'", None),
    "defaults": ('python train.py --a ${A:-1} --b "${B:-x y}" --c ${C:-}', ["--a", "1", "--b", "x y", "--c"]),
    "unset": ("python train.py --key ${KEY}/x", ["--key", f"{UNSET}KEY{END}/x"]),
    "output": ("python train.py --n $(nproc --all) --m `id -u`", ["--n", OUTPUT, "--m", OUTPUT]),
    "ray": (
        'R="{\n  \\"env\\": \\"$(id)\\"\n}"\n'
        'ray job submit --address=x --runtime-env-json="${R}" \\\n   -- python3 train.py \\\n --a 1',
        ["--a", "1"],
    ),
    "redirected": ("nohup python train.py --a 1 > log.txt 2>&1 &", ["--a", "1"]),
    "piped": ("python train.py --a 1 2>&1 | tee log && echo done", ["--a", "1"]),
    "shell": ('bash -c "python train.py --a 1"', ["--a", "1"]),
    "comment": ("# python train.py --old\npython train.py --a '#no' # yes", ["--a", "#no"]),
    "heredoc": ("cat <<'EOF' > x\npython train.py --wrong 'unbalanced\nEOF\npython train.py --a 1", ["--a", "1"]),
    "subshell": ("(cd /x && python train.py --a 1)", ["--a", "1"]),
    "condition": ("N=2\nif true; then N=3; fi\npython train.py --n $N", ["--n", "2"]),
    "crlf": ("A=(--a 1)\r\npython train.py ${A[@]}\r\n", ["--a", "1"]),
    "environment": ("CUDA=1 python /root/slime/train.py --a", ["--a"]),
    "case": ('case $X in\n  a) Y=1 ;;\n  *) Y=2 ;;\nesac\npython train.py --a "1 \\" 2"', ["--a", '1 " 2']),
    "loop": ("for ((i=0; i<3; i++)); do B+=($i); done\npython train.py --a", ["--a"]),
}
SCRIPTS["array"] = (SCRIPTS["array"][0], ["--lr", "1e-6", "--x", "a", "b"])
SCRIPTS["variables"] = (SCRIPTS["variables"][0], ["--a", "/m", "--b", "/m/n.x", "--c", "$M"])


@pytest.mark.parametrize(("text", "words"), SCRIPTS.values(), ids=SCRIPTS)
def test_words_of_the_training_command(script, text, words):
    assert words_of(script(text)) == words


def test_a_variable_set_under_a_condition_is_taken_where_it_has_no_other_value_and_said(script):
    launch = read_launch(
        script(
            'FOUND=$(nvidia-smi -L | wc -l)\nN=${N:-${FOUND}}\nif [ -z "$N" ]; then\n  N=8\nfi\n'
            "LINK=1\nif x; then OTHER=1; fi\nray start --n $OTHER\npython train_async.py --n $N"
        )
    )
    assert (launch.program, launch.words) == ("train_async.py", ("--n", "8"))
    assert launch.notes == ("N is set under a condition; '8' is taken",)


def test_sourced_files_are_found_where_slime_keeps_them(script, tmp_path):
    script("MODEL_ARGS=(--layers ${LAYERS:-36})", "models/m.sh")
    here = 'DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"\n'
    for line in ('source "${DIR}/models/m.sh"', "source /root/slime/scripts/models/m.sh", ". models/m.sh"):
        assert words_of(script(f"{here}{line}\npython train.py ${{MODEL_ARGS[@]}}")) == ["--layers", "36"]
    (tmp_path / "deeper").mkdir()
    above = script('source "$(dirname "$0")/../models/m.sh"\npython train.py ${MODEL_ARGS[@]}', "deeper/run.sh")
    assert words_of(above) == ["--layers", "36"]


def test_a_sourced_file_that_is_missing_is_said(script):
    launch = read_launch(script("source $X/none.sh\npython train.py ${MODEL_ARGS[@]} --a"))
    assert launch.words == (f"{UNSET}MODEL_ARGS{END}", "--a")
    assert launch.notes == ("'${X}/none.sh', which the script sources, is not here: what it sets is missing",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'open\npython train.py", 'line 1 of the script opens "\'o" without an end.'),
        ("A=(\n--a", "line 1 of the script opens '(' without an end."),
        ("echo\necho $(a", "line 2 of the script opens '$(' without an end."),
        ("echo hello", "'PATH' has no command that runs train.py or train_async.py; give a launch script of slime."),
        ("python train.py\0", "'PATH' is not text: it has null bytes."),
        ("$(" * 5000, "'PATH' nests quotes or substitutions too deeply."),
    ],
    ids=["an open quote", "an open array", "an open substitution", "no training", "null bytes", "nested too deeply"],
)
def test_what_cannot_be_read_is_refused(script, text, message):
    path = script(text)
    with pytest.raises(ValueError) as refusal:
        read_launch(path)
    assert str(refusal.value).replace(str(path), "PATH") == message


def test_nothing_is_run(script, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    path = script(f"$(rm -rf {victim})\nrm -rf {victim}\n`rm -rf {victim}`\npython train.py --a $(rm -rf {victim}) --b")
    assert words_of(path) == ["--a", OUTPUT, "--b"]
    assert victim.exists()


def test_a_fifo_is_no_script(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is not a file; give a launch script of slime"):
        read_launch(tmp_path / "pipe")

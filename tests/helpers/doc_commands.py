"""How each command of the docs is tested. test_docs.py fails on an entry whose command is gone."""

from dataclasses import dataclass

from doc_workspace import ONE_STEP


@dataclass(frozen=True)
class Run:
    """Run as it is written, in the workspace."""

    more: str = ""
    """Overrides after it, which make it small."""
    before: str = ""
    """The command whose output it reads, where that is not the first one."""
    says: str = ""
    """A regular expression that its output has."""
    status: int = 0
    containers: bool = False


@dataclass(frozen=True)
class First:
    """Run before all others, small: what others look at is its run."""

    says: str


@dataclass(frozen=True)
class Page:
    """A command that serves a web page until it is interrupted: the page is there."""

    has: str


@dataclass(frozen=True)
class Elsewhere:
    """That very command, or what it does with names of its own, is run by another test."""

    test: str
    """FILE::FUNCTION."""
    names: str
    """What that file has of the command: a script, a setting, a file."""


@dataclass(frozen=True)
class Install:
    """Nothing is installed by tests: each name is an extra of ours, or a package that an extra has."""


QUICKSTART = "bash scripts/quickstart.sh"
PAPER_RUN = Elsewhere("tests/configs/test_paper_configs.py::test_one_step_in_miniature", "scripts/train.py")
PAPER_TASKS = Elsewhere("tests/configs/test_paper_configs.py::test_one_step_in_miniature", "build_pypi_tasks.py")
REAL_COLLECT = Elsewhere("tests/cli/test_collect.py::test_the_documented_command", "CONFIG = ")
REAL_SERVER = Elsewhere("tests/engine/test_remote.py::test_the_command_collects_from_the_server", "processed_logprobs")
TEXT_ONLY = Elsewhere("tests/collect/test_text_only.py::test_the_command_collects_messages_and_says_so", "--text_only")
EVALS = Elsewhere("tests/cli/test_eval.py::test_every_documented_command_is_understood", "find_commands(DOCS")
REAL_EVAL = Elsewhere(
    "tests/cli/test_eval.py::test_from_the_first_session_over_two_kills_to_the_summary", "find_commands(DOCS"
)
TABLE = Elsewhere("tests/scripts/test_reproduce_table.py::test_the_documented_commands", "reproduce_table")
SHARDED = Elsewhere("tests/grpo/test_accelerate_configs.py::test_sharded_training_gives_the_numbers_of_ddp", "ddp")
RESUMED = Elsewhere(
    "tests/grpo/resume/test_resume.py::test_sigterm_says_how_to_go_on_and_the_folder_is_not_begun_in_again",
    '"--resume_from_checkpoint", "auto"',
)
DOCKER_CHECK = Elsewhere("tests/cli/test_check_tasks.py::test_a_rebuilt_task_in_containers", '"--sandbox", "docker"')
ALL_AGENTS = Elsewhere("tests/cli/test_doctor.py::test_it_says_of_each_agent_that_it_works", "doctor")
CI = Elsewhere(".ci/run", "bash scripts/test.sh")
CI_SETUP = Elsewhere("scripts/test.sh", 'python" scripts/dev/make_test_image.py')

FITS = "fits"
GOOD = "1 of 1 tasks are good"

COMMANDS: dict[str, Run | First | Page | Elsewhere | Install] = {
    # the way from nothing to a run
    QUICKSTART: First(says=r"reward_last_quarter[^$]*check it:   polar-trl replay runs/first"),
    "bash scripts/test.sh": CI,
    "source .venv/bin/activate": Run("&& command -v python", says="bin/python"),
    "polar-trl inspect RUN": Page("<title>"),
    "polar-trl replay RUN": Run(says=r"digest mismatches +│ +0"),
    "polar-trl replay RUN/sessions/.*": Run(says=r"sessions +│ +1 "),
    "tail -n 1 RUN/log.jsonl": Run(says='"step": 1'),
    r"accelerate launch scripts/train.py --config configs/ladder_2_write_command.yaml": Run(
        f"{ONE_STEP} --output_dir runs/rung2", says="check it: +polar-trl replay runs/rung2"
    ),
    # agents
    "polar-trl doctor pi --install": Run(says="pi"),
    "polar-trl doctor --install": ALL_AGENTS,
    "polar-trl doctor": ALL_AGENTS,
    "polar-trl doctor codex pi": ALL_AGENTS,
    "polar-trl doctor --sandbox bwrap --json": Run("pi", says='"works": true', containers=True),
    "polar-trl doctor .* --sandbox docker --sandbox_image .*": Run(
        says=r"pi +│ 1\.\S+ +│ 1\.\S+ +│ yes", containers=True
    ),
    "grep -v '\\^grader:' configs/quickstart.yaml > my_run.yaml": Run(
        "&& tail -n +1 my_run.yaml", says="agent_command"
    ),
    "polar-trl eval --config my_run.yaml --tasks my_tasks.jsonl --agent_command .*": Run(
        "--max_agents 2", says="2, 2 graded"
    ),
    "accelerate launch scripts/train.py --config my_run.yaml --tasks my_tasks.jsonl --agent_command .*": Run(
        ONE_STEP, says="check it: +polar-trl replay runs/mine"
    ),
    "accelerate launch scripts/train.py --config configs/qwen3_4b_pi_pypi_1gpu.yaml --agent codex .*": PAPER_RUN,
    # tasks
    "python scripts/build_pypi_tasks.py --out tasks( --limit 40)?": PAPER_TASKS,
    "python scripts/build_pypi_tasks.py --out tasks --only .*": PAPER_TASKS,
    "python scripts/build_pypi_tasks.py --out edits --mutate .*": Run("--count 1", says="semver"),
    "polar-trl check-tasks tasks --sandbox docker --sandbox_image IMAGE": Run(says=GOOD, containers=True),
    "polar-trl check-tasks tasks --sandbox docker --sandbox_image polar-trl-test:latest --json > checks.json": Run(
        "&& cat checks.json", says='"gold": 1.0', containers=True
    ),
    "polar-trl check-tasks tasks --sandbox bwrap": Run(says=GOOD, containers=True),
    "polar-trl check-tasks tasks --sandbox bwrap --jobs 2 --json": Run(says='"gold": 1.0', containers=True),
    "polar-trl check-tasks skyrl-v0-293 --sandbox docker --limit 10": DOCKER_CHECK,
    "python scripts/dev/pypi_tasks_table.py tasks checks.json": Run(
        before="polar-trl check-tasks tasks --sandbox bwrap --json > checks.json", says="calc", containers=True
    ),
    "polar-trl eval --config configs/qwen3_4b_pi_pypi_1gpu.yaml --sandbox_image IMAGE .*": EVALS,
    "accelerate launch scripts/train.py --config configs/qwen3_4b_pi_pypi_1gpu.yaml --sandbox_image IMAGE": Run(
        "$(grep -v '^#' configs/miniature.txt) --num_generations 4 --gradient_accumulation_steps 1 "
        "--model_name_or_path tiny --output_dir runs/rung5",
        says="check it: +polar-trl replay runs/rung5",
        containers=True,
    ),
    # memory, GPUs, going on
    "polar-trl plan --config configs/qwen3_4b_pi_pypi_1gpu.yaml --gpu 80GB": Run(says=FITS),
    "polar-trl plan --config configs/qwen3.5-4b_pi_skyrl293_1gpu_lora.yaml --gpu 80GB": Run(says=FITS),
    "polar-trl plan --config configs/qwen3.5-4b_pi_skyrl293_8xh100.yaml .*": Run(says=FITS),
    "accelerate launch --config_file configs/accelerate/ddp_8gpu.yaml .*": SHARDED,
    "accelerate launch scripts/train.py --config my_run.yaml --resume_from_checkpoint auto": RESUMED,
    "polar-trl clean": Run(),
    # templates
    "polar-trl lint-template Qwen/Qwen3.5-4B": Run(says="exact|turn"),
    "polar-trl lint-template path/to/model( --thinking template)?": Run(says="turn"),
    "polar-trl lint-template path/to/model --session .*": Run(says="turn"),
    # evaluations and data
    "polar-trl eval --config configs/quickstart.yaml --limit 6 .*": REAL_EVAL,
    "polar-trl eval .*": EVALS,
    "bash scripts/quickstart.sh --seed 1 --save_strategy steps .*": Run(
        f"--steps 1 --save_steps 1 {ONE_STEP}", says="check it: +polar-trl replay runs/ladder_1"
    ),
    "python -m polar_trl.tasks.shell_ladder .* --output new_tasks.jsonl": Run("&& wc -l new_tasks.jsonl", says="^48 "),
    "python scripts/reproduce_table.py .*": TABLE,
    "polar-trl collect --config configs/quickstart.yaml .*": REAL_COLLECT,
    "polar-trl collect .* --text_only .*": TEXT_ONLY,
    "polar-trl collect .*": REAL_SERVER,
    "vllm serve .* --logprobs-mode processed_logprobs": REAL_SERVER,
    # the paper
    "pip install .*": Install(),
    "accelerate launch .* --config configs/qwen3.5-4b_.*_skyrl293_.*": PAPER_RUN,
    r'eval "\$\(bash scripts/dev/container_engine.sh up\)" && python scripts/dev/make_test_image.py': CI_SETUP,
    "python tests/helpers/tiny_paper_model.py .cache/models/SmolLM2-135M-Instruct tiny": Run(
        "&& ls tiny", says="config.json"
    ),
    "polar-trl replay runs/miniature": PAPER_RUN,
}
"""Regular expression of a whole command -> how it is tested. The first that matches counts."""

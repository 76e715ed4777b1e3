"""Say how each command of README.md and docs/ is tested, by a regular expression of the whole command.

The first that matches counts. tests/docs/test_docs.py fails on a command that has no entry, and on an entry whose
command is gone.
"""

from dataclasses import dataclass

ONE_STEP = (
    "--max_steps 1 --gradient_accumulation_steps 2 --per_device_train_batch_size 4 --num_generations 4 "
    "--drop_zero_variance false --entropy_coef 0.01"
)
"""Overrides that make a step of the quickstart small, and one with a gradient whatever is sampled."""
OWN_AGENT_STEP = (
    f"{ONE_STEP} --model_name_or_path tiny --use_cpu true --bf16 false --gradient_checkpointing false "
    "--vllm_enable_sleep_mode false --max_completion_length 48 --save_strategy no"
)
"""A step of a 4B model's run file on two CPU cores, with a tiny model; the window and the calls stay."""
FIRST = "runs/first"
QUICKSTART = "bash scripts/quickstart.sh"


@dataclass(frozen=True)
class Run:
    """Run as it is written, in the workspace."""

    says: str
    """A regular expression that its output has."""
    more: str = ""
    """Overrides after it, which make it small."""
    before: str = ""
    """A command whose output it reads."""
    containers: bool = False


PAPER = "tests/configs/test_paper_configs.py::test_one_step_in_miniature"
SERVER = "tests/engine/test_remote.py::test_the_command_collects_from_the_server"
QUICKSTARTED = "tests/scripts/test_quickstart.py"
TRAINED = "tests/scripts/test_train.py"
CHECKED = "tests/cli/test_check_tasks.py::test_a_rebuilt_task_in_containers"
DOCTOR = "tests/cli/test_doctor.py::test_it_says_of_each_agent_that_it_works"
TRIED = "tests/scripts/dev/test_try_agents.py::test_an_agent_of_the_examples_works"
SECURITY = "tests/cli/test_doctor.py::test_security_says_what_each_sandbox_holds"
SERVED = "tests/cli/test_serve.py::test_ctrl_c_ends_it_and_what_it_recorded_is_read"
OWN_REPOSITORY = "tests/examples/test_own_repository.py"
AFTER = "tests/examples/test_after_training.py"
GYM = "tests/eval/test_gym.py"
WARM = "tests/examples/test_warm_start.py"
TWO_RUNS = "tests/tools/inspector/test_browser.py::test_two_sessions_of_a_task_side_by_side"
CLUSTER = "tests/cluster/test_sessions.py::test_doctor_tries_agents_on_every_node"
GOOD = "1 of 1 tasks are good"

COMMANDS: dict[str, Run | str] = {
    # the way from nothing to a run
    QUICKSTART: Run(rf"check it: +polar-trl replay {FIRST}", f"--steps 1 {ONE_STEP} --output_dir {FIRST}"),
    f"{QUICKSTART} --seed 1 --output_dir .*": QUICKSTARTED,
    "bash scripts/test.sh": ".ci/run",
    "source .venv/bin/activate": QUICKSTARTED,
    "polar-trl inspect RUN": "tests/tools/inspector/test_app.py",
    "polar-trl inspect RUN OTHER_RUN": TWO_RUNS,
    "polar-trl replay RUN": Run(r"digest mismatches +│ +0"),
    "polar-trl replay RUN/sessions/.*": Run(r"sessions +│ +1 "),
    "tail -n 1 RUN/log.jsonl": Run('"step": 1'),
    "polar-trl train quickstart": QUICKSTARTED,
    "polar-trl train ladder_commands": TRAINED,
    # an own repository, and what comes after: their tests run the pages' commands in order
    "cd examples/own_repository": OWN_REPOSITORY,
    "polar-trl check-tasks tasks.jsonl --sandbox (docker|bwrap)": OWN_REPOSITORY,
    "polar-trl doctor 'python3 .*/agent.py {instruction}' .*": OWN_REPOSITORY,
    "polar-trl eval --config (run|cpu).yaml .*": OWN_REPOSITORY,
    "polar-trl train --config (run|cpu).yaml": OWN_REPOSITORY,
    "polar-trl inspect runs/(own_repository|cpu)": "tests/tools/inspector/test_app.py",
    "polar-trl merge runs/own_repository runs/merged": AFTER,
    "polar-trl serve runs/merged --config run.yaml": "tests/cli/test_serve.py",
    "vllm serve .* --enable-auto-tool-choice .*": AFTER,
    "python -m vllm.entrypoints.openai.api_server --model runs/merged .*": AFTER,
    "hf (auth login|upload USER/NAME runs/merged)": AFTER,
    "hf upload USER/NAME runs/own_repository .*": AFTER,
    "polar-trl collect --config run.yaml .*": AFTER,
    "python sft.py": AFTER,
    "polar-trl train --config run.yaml --model_name_or_path runs/sft .*": AFTER,
    "polar-trl collect --config small/pi .*": WARM,
    "trl sft .*": WARM,
    "polar-trl train small/pi .*": WARM,
    "polar-trl eval --config small/pi .*": WARM,
    "python -m polar_trl.tasks.shell_ladder .* --output hard.jsonl": WARM,
    # agents
    "polar-trl doctor pi --install": Run("pi"),
    "polar-trl doctor( --install| codex pi)?": DOCTOR,
    "polar-trl doctor pi@1.5.2 --install": "tests/cli/test_doctor.py::test_another_version_is_tried",
    "polar-trl doctor .*my-agent/run --yes .*": Run("works: yes"),
    "PYTHONPATH=. polar-trl doctor my_agents:MyAgent .*": Run("works: yes"),
    "PYTHONPATH=. polar-trl train .* --agent my_agents:MyAgent .*": (
        "tests/harness/test_own.py::test_a_run_file_names_a_class"
    ),
    "npm install --prefix agents/continue .*": TRIED,
    "polar-trl doctor .*agents/continue .*": TRIED,
    "polar-trl doctor --config ladder_pi": Run("pi +│ 1\\.\\S+ +│ 1\\.\\S+ +│ yes"),
    "polar-trl doctor codex pi --model MODEL --window 16384": (
        "tests/cli/test_doctor.py::test_a_prompt_is_counted_by_a_models_tokenizer_and_has_to_fit_the_window"
    ),
    "polar-trl doctor --sandbox bwrap --json": Run('"works": true', "pi", containers=True),
    "polar-trl doctor --security( --json)?": SECURITY,
    "polar-trl doctor --security --sandbox docker --image IMAGE": (
        "tests/cli/test_doctor.py::test_security_in_containers"
    ),
    "polar-trl doctor (pi|--security) --sandbox bwrap --(sandbox_)?image IMAGE": (
        "tests/cli/test_doctor.py::test_in_an_unpacked_image"
    ),
    "polar-trl doctor .* --sandbox docker --sandbox_image .*": Run(r"pi +│ 1\.\S+ +│ 1\.\S+ +│ yes", containers=True),
    "polar-trl configs own_agent > my_run.yaml": Run("max_session_calls: 50", "&& cat my_run.yaml"),
    "polar-trl eval --config my_run.yaml --tasks my_tasks.jsonl --agent_command .*": "tests/cli/test_eval.py",
    "polar-trl train my_run.yaml --tasks my_tasks.jsonl --agent_command .*": Run(
        "check it: +polar-trl replay runs/mine", OWN_AGENT_STEP
    ),
    "polar-trl train pi_1gpu --agent codex .*": PAPER,
    # tasks
    "python scripts/build_pypi_tasks.py --out tasks( .*)?": PAPER,
    "python scripts/build_pypi_tasks.py --out edits --mutate .*": Run("semver", "--count 1"),
    "polar-trl check-tasks (tasks|skyrl-v0-293) --sandbox docker .*": CHECKED,
    "polar-trl check-tasks skyrl-v0-293 --sandbox bwrap .*": (
        "tests/cli/test_check_tasks.py::test_a_row_of_swe_bench_without_an_engine"
    ),
    "polar-trl check-tasks tasks --sandbox bwrap": Run(GOOD, containers=True),
    "polar-trl check-tasks tasks --sandbox bwrap --jobs 2 --json": CHECKED,
    "python scripts/dev/pypi_tasks_table.py tasks checks.json": Run(
        "calc", before="polar-trl check-tasks tasks --sandbox bwrap --json > checks.json", containers=True
    ),
    "polar-trl eval --config pi_1gpu --sandbox_image IMAGE .*": "tests/cli/test_eval.py",
    "polar-trl train pi_1gpu --sandbox_image IMAGE": ("tests/grpo/test_pypi_step.py"),
    # NeMo Gym
    "python3.12 -m venv gym-env .*": GYM,
    "cd examples/nemo_gym": GYM,
    "export POLAR_TRL=.*": GYM,
    "gym (env start|eval run) .*": GYM,
    "polar-trl eval --config my_run.yaml --tasks gym-env/.*": f"{GYM}::test_an_evaluation_has_gyms_rewards",
    # memory, GPUs, going on
    "polar-trl plan .*": Run("fits"),
    "polar-trl train pi_1gpu --accelerate ddp_8gpu .*": "tests/grpo/test_accelerate_configs.py",
    "polar-trl train my_run.yaml --resume_from_checkpoint auto": ("tests/grpo/resume/test_resume.py"),
    "polar-trl clean": Run(""),
    # a cluster of Ray's
    "pip install 'polar-trl\\[ray\\]'": "tests/cluster/test_docs.py::test_the_extra_has_the_version_that_is_tested",
    "polar-trl doctor pi --sandbox_cluster auto --install": CLUSTER,
    "polar-trl train pi_1gpu --sandbox_cluster auto": "scripts/machines/sessions.py::prove_sessions",
    "openssl .*": "scripts/machines/ray_cluster.py::_make_certificate",
    "export RAY_.*": "scripts/machines/ray_cluster.py::env",
    "ray start .*": "scripts/machines/ray_cluster.py::_start",
    "kubectl .*": "tests/cluster/test_docs.py::test_the_manifest_has_room_for_what_the_page_says",
    # two machines, in scripts/test.sh machines
    "accelerate launch --multi_gpu --num_machines 2 .*": "scripts/machines/ranks.py::build_accelerate",
    "torchrun --nnodes 2 .*": "scripts/machines/ranks.py::build_torchrun",
    "sbatch examples/more_machines/train.sbatch .*": "scripts/machines/ranks.py::read_job",
    # templates
    "polar-trl lint-template Qwen/Qwen3.5-4B": Run("exact|turn"),
    "polar-trl lint-template path/to/model .*": Run("turn"),
    "polar-trl lint-template path/to/model": "tests/cli/test_lint_template.py",
    # evaluations and data
    "polar-trl eval .*": "tests/cli/test_eval.py::test_every_documented_command_is_understood",
    "python -m polar_trl.tasks.shell_ladder .* --output new_tasks.jsonl": Run("^48 ", "&& wc -l new_tasks.jsonl"),
    "python scripts/reproduce_table.py .*": "tests/scripts/test_reproduce_table.py::test_the_documented_commands",
    "polar-trl collect --config quickstart .*": "tests/cli/test_collect.py::test_the_documented_command",
    "polar-trl serve .*": SERVED,
    "polar-trl inspect runs/serve-checkpoint-70": SERVED,
    "polar-trl replay runs/serve-checkpoint-70": SERVED,
    "polar-trl collect --recorded .*": SERVED,
    "polar-trl collect .* --text_only .*": (
        "tests/collect/test_text_only.py::test_the_command_collects_messages_and_says_so"
    ),
    "polar-trl collect .*": SERVER,
    "vllm serve .* --logprobs-mode processed_logprobs": SERVER,
    "pip wheel .*": "tests/test_wheel.py::test_it_trains_the_quickstart_in_an_empty_folder",
    # the paper
    "pip install .*": "tests/docs/test_docs.py::test_extras_that_are_named_exist",
    "polar-trl train swe_.*": PAPER,
    r'eval "\$\(bash scripts/dev/container_engine.sh up\)" && python .*make_test_image.py': "scripts/test.sh",
    "bash scripts/gpu/run.sh learn .*": "tests/scripts/gpu/test_learn.py::test_the_documented_commands",
    "python tests/helpers/tiny_paper_model.py .cache/models/SmolLM2-135M-Instruct tiny": PAPER,
    "polar-trl replay runs/miniature": PAPER,
}
"""A `Run`, or FILE or FILE::FUNCTION of the test that runs it, or what it does with names of its own."""

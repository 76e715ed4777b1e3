# Aider 0.86.2 over Chat Completions; it edits by the text of its answers and declares no tools.
#
#   uv venv --python 3.11 agents/aider && uv pip install --python agents/aider aider-chat==0.86.2
#   agent_command: bash ~/aider.sh FOLDER {instruction_file}
#
# --no-git: it would make a repository, and commit each of its edits.
export PATH="$1/bin:$PATH"
exec aider --model "openai/$POLAR_MODEL" --message-file "$2" --yes-always --no-git --no-pretty --no-check-update \
  --analytics-disable --no-show-model-warnings --no-show-release-notes --no-detect-urls </dev/null

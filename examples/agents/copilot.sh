# GitHub Copilot CLI 1.0.102 over Chat Completions, offline: with a provider of one's own it asks for no account.
#
#   npm install --prefix agents/copilot @github/copilot@1.0.102
#   agent_command: bash ~/copilot.sh FOLDER {instruction_file}
export PATH="$1/node_modules/.bin:$PATH"
export COPILOT_OFFLINE=true COPILOT_AUTO_UPDATE=false COPILOT_MODEL="$POLAR_MODEL"
export COPILOT_PROVIDER_BASE_URL="$OPENAI_BASE_URL" COPILOT_PROVIDER_API_KEY="$OPENAI_API_KEY"
export COPILOT_PROVIDER_MAX_OUTPUT_TOKENS="$POLAR_MAX_TOKENS"
export COPILOT_PROVIDER_MAX_PROMPT_TOKENS=$((POLAR_MAX_MODEL_LEN - POLAR_MAX_TOKENS))
exec copilot --allow-all-tools --no-color <"$2"

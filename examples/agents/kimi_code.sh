# Kimi Code 2.1.0 over Chat Completions, on Node 22.
#
#   npm install --prefix agents/kimi-code @moonshot-ai/kimi-code@2.1.0 node@22.23.3
#   agent_command: bash ~/kimi_code.sh FOLDER {instruction}
#
# It takes the instruction as an argument only, which may have 127 KiB.
export PATH="$1/node_modules/.bin:$PATH"
export KIMI_CODE_NO_AUTO_UPDATE=1 KIMI_MODEL_PROVIDER_TYPE=openai KIMI_MODEL_NAME="$POLAR_MODEL"
export KIMI_MODEL_BASE_URL="$OPENAI_BASE_URL" KIMI_MODEL_API_KEY="$OPENAI_API_KEY"
export KIMI_MODEL_MAX_CONTEXT_SIZE="$POLAR_MAX_MODEL_LEN" KIMI_MODEL_MAX_OUTPUT_SIZE="$POLAR_MAX_TOKENS"
exec kimi -p "$2" </dev/null

# Continue's CLI 1.5.47 over Chat Completions.
#
#   npm install --prefix agents/continue @continuedev/cli@1.5.47
#   agent_command: bash ~/continue.sh FOLDER {instruction_file}
export PATH="$1/node_modules/.bin:$PATH"
cat >~/continue.yaml <<END
name: polar
version: 0.0.1
schema: v1
models:
  - name: policy
    provider: openai
    model: $POLAR_MODEL
    apiBase: $OPENAI_BASE_URL
    apiKey: $OPENAI_API_KEY
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions: {contextLength: $POLAR_MAX_MODEL_LEN, maxTokens: $POLAR_MAX_TOKENS}
END
exec cn -p --auto --config ~/continue.yaml <"$2"

# Cline 3.0.65 over Chat Completions, with its settings made by its own `cline auth`.
#
#   npm install --prefix agents/cline cline@3.0.65
#   agent_command: bash ~/cline.sh FOLDER {instruction_file}
export PATH="$1/node_modules/.bin:$PATH"
cline auth --provider openai-compatible --apikey "$OPENAI_API_KEY" --modelid "$POLAR_MODEL" \
  --baseurl "$OPENAI_BASE_URL" </dev/null || exit
cat "$2" | cline --auto-approve true  # 3.0.65 does not read a small file on stdin, but a pipe

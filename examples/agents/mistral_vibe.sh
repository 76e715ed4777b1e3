# Mistral Vibe 3.0.2 over Chat Completions; it needs Python 3.12.
#
#   uv venv --python 3.12 agents/mistral-vibe && uv pip install --python agents/mistral-vibe mistral-vibe==3.0.2
#   agent_command: bash ~/mistral_vibe.sh FOLDER {instruction_file}
export PATH="$1/bin:$PATH"
mkdir -p ~/.vibe
cat >~/.vibe/config.toml <<END
active_model = "policy"
enable_telemetry = false
enable_update_checks = false
enable_notifications = false

[session_logging]
generate_titles = false

[[providers]]
name = "polar"
api_base = "$OPENAI_BASE_URL"
api_key_env_var = "OPENAI_API_KEY"
backend = "generic"

[[models]]
name = "$POLAR_MODEL"
alias = "policy"
provider = "polar"
max_context_length = $POLAR_MAX_MODEL_LEN
max_output_tokens = $POLAR_MAX_TOKENS
END
exec vibe --auto-approve --trust --prompt-file "$2" </dev/null

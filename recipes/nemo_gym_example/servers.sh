#!/usr/bin/env bash
# servers.sh VENV POLICY_BASE_URL HEAD_PORT DIR: NeMo-Gym's head server, its example of several steps, the simple agent and the model server that
# asks the policy. NeMo-Gym makes an environment for every server; here all of them take VENV, found through links below DIR.
set -euo pipefail
[ -x "$1/bin/gym" ] || { echo "servers.sh: $1 is not there; make nemo-gym" >&2; exit 2; }
venv=$(cd "$1" && pwd)
mkdir -p "$4" && cd "$4"
for server in resources_servers/example_multi_step responses_api_models/vllm_model responses_api_agents/simple_agent; do
  mkdir -p "venvs/$server"
  ln -sfn "$venv" "venvs/$server/.venv"
done
# Ray gives up after a minute by default, which a busy machine takes to start it.
export RAY_raylet_start_wait_time_s=300
configs=resources_servers/example_multi_step/configs/example_multi_step.yaml
configs+=,responses_api_models/vllm_model/configs/vllm_model_for_training.yaml
exec "$venv/bin/gym" env start "+config_paths=[$configs]" "++policy_base_url=$2" ++policy_api_key=none ++policy_model_name=policy \
  ++head_server.host=127.0.0.1 "++head_server.port=$3" ++skip_venv_if_present=true "++uv_venv_dir=$PWD/venvs"

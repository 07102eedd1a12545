#!/usr/bin/env bash
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ layout.nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{ gpus }}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:TERM@180
{% for line in lines %}
#SBATCH {{ line }}
{% endfor %}

# One run, written by `asyncrl slurm`: learner, servers and driver. What ends first ends the others.
# Their logs and the secrets of the job are in slurm-JOB, beside what sbatch writes itself.
set -euo pipefail
cd -- {{ directory | sh }}
python={{ python | sh }}
recipe={{ recipe | sh }}
job="$PWD/slurm-$SLURM_JOB_ID"
{% if run %}
run={{ run | sh }}
{% else %}
run={{ runs | sh }}/{{ name }}-slurm-"$SLURM_JOB_ID"
{% endif %}
names="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
mapfile -t hosts <<< "$names"

secret() {
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n'
}

declare -A parts=() # process -> name
driver=

part() { # NAME COMMAND ..: in the background
    "${@:2}" > "$job/$1.log" 2>&1 &
    parts[$!]="$1"
}

on_nodes() { # FIRST COUNT COMMAND ..: one process on each node
    local nodes=("${hosts[@]:$1:$2}")
    exec srun --overlap --kill-on-bad-exit=1 --nodes="$2" --ntasks="$2" --ntasks-per-node=1 \
        --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --nodelist="$(IFS=,; echo "${nodes[*]}")" "${@:3}"
}

finish() { # CODE: the driver first, which saves the run
    trap '' TERM INT
    trap - EXIT
    if [[ -n $driver ]]; then
        kill -TERM "$driver" 2> /dev/null || true
        for _ in {1..120}; do
            kill -0 "$driver" 2> /dev/null || break
            sleep 1
        done
    fi
    kill -TERM "${!parts[@]}" 2> /dev/null || true
    exit "$1"
}

look() { # ends the job if a part has ended
    local process code=0
    if [[ -n $driver ]] && ! kill -0 "$driver" 2> /dev/null; then
        wait "$driver" || code=$?
        finish "$code"
    fi
    for process in "${!parts[@]}"; do
        if ! kill -0 "$process" 2> /dev/null; then
            wait "$process" || code=$?
            echo "${parts[$process]} has ended, with code $code, and so all ends; its last lines:" >&2
            tail -n 20 "$job/${parts[$process]}.log" >&2
            finish 1
        fi
    done
}

until_said() { # NAME TEXT
    until grep -sqF -- "$2" "$job/$1.log"; do
        look
        sleep 1
    done
}

stop() { # the time is nearly up: the run ends in order
    if [[ -n $driver ]]; then
        kill -TERM "$driver" 2> /dev/null || true
    else
        finish 1
    fi
}

trap stop TERM INT
trap 'finish 1' EXIT
mkdir -p -- "$job"
(umask 077 && secret > "$job/token")
{% if own_key %}
{{ key_name }}="$(secret)"
export {{ key_name }}
{% endif %}

# The learner's ranks: rank 0 is on the first node, and waits for the driver.
first="${hosts[0]}"
# shellcheck disable=SC2016  # each node puts its own number in
part learner on_nodes 0 {{ layout.learner_nodes }} \
    env PYTHONPATH={{ recipe.parent | sh }}"${PYTHONPATH:+:$PYTHONPATH}" CUDA_VISIBLE_DEVICES={{ range(layout.ranks_per_node) | join(",") }} \
    bash -c 'exec "$1" -m torch.distributed.run --nnodes={{ layout.learner_nodes }} --nproc-per-node={{ layout.ranks_per_node }} --node-rank="$SLURM_PROCID" --master-addr="$2" --master-port=29500 "${@:3}"' \
    ranks "$python" "$first" -m asyncrl.learning.ranks --listen 0.0.0.0:29400 --token-file "$job/token" --timeout-s {{ timeout_s }}

# The servers.
{% for server in layout.servers %}
part server-{{ loop.index0 }} on_nodes {{ server.node }} 1 \
    env CUDA_VISIBLE_DEVICES={{ server.gpus | join(",") }} \
    "$python" -m asyncrl {{ server_command[0] | sh }} --port {{ server.port }} --api-key-env {{ key_name }}{% for word in server_command[1:] %} {{ word | sh }}{% endfor %}

{% endfor %}

until_said learner 'waits for the driver'
{% for server in layout.servers %}
until_said server-{{ loop.index0 }} '"ready": true'
echo "http://${hosts[{{ server.node }}]}:{{ server.port }}" >> "$job/servers.new"
{% endfor %}
mv -- "$job/servers.new" "$job/servers"

# The driver. A job that was requeued goes on with its run.
where=(--run-dir "$run")
if [[ -e $run/run.json ]]; then
    where=(--resume "$run")
fi
"$python" -m asyncrl train "$recipe" "${where[@]}"{% for setting in settings %} --set {{ setting | sh }}{% endfor %} \
    --set sampler.backend=sglang --set sampler.urls_file="$job/servers" --set sampler.api_key_env={{ key_name }} \
    --set model.address="$first:29400" --set model.token_file="$job/token" &
driver=$!
parts[$driver]=driver
while true; do
    wait -n || true
    look
done

# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""
A real vLLM server on the CPU: weights through files, wrong servers refused, killed and restarted in mid-run.

The tests of the row-wise server share one, in the order in which they stand: each start costs some ten seconds.
"""

import copy
import ctypes
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
import urllib.request

import pytest
import torch
from conftest import SETTINGS, digits_reward
from peft import LoraConfig
from safetensors.torch import load_file

from trl_calclip import CalibratedDAPOConfig, CalibratedDAPOTrainer
from trl_calclip._trl_compat import RolloutServerError
from trl_calclip.checkpoint import read_state
from trl_calclip.fp8.recipes import get_recipe
from trl_calclip.fp8.selection import Selection
from trl_calclip.fp8.server_checks import server_problems
from trl_calclip.fp8.server_client import ServerClient
from trl_calclip.fp8.weight_files import PREFIX, WeightFiles, remove_leftovers


PROBE = list(range(2, 30))
ROWWISE = ["--quantization", "fp8_per_channel", "--logprobs-mode", "processed_logprobs"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def die_with_parent() -> None:
    """Tests that are killed leave no server behind: it shuts down, and its other processes with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class Server:
    """`vllm serve` on the CPU, in a process group of its own, on a port that survives restarts."""

    def __init__(self, model: str, log):
        self.port = free_port()
        self.model = model
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self, *flags: str, **variables: str) -> None:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16", "--enforce-eager"]
        command += ["--max-model-len", "80", *flags]
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **variables,
        }
        with open(self.log, "a") as file:
            self.process = subprocess.Popen(
                command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def wait_until_up(self) -> "Server":
        deadline = time.monotonic() + 300
        while True:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return self
            except OSError:
                time.sleep(0.5)

    def kill(self) -> None:
        """All of its processes, without a word, as a lost machine would."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def new_server(toy_path, tmp_path_factory):
    servers = []

    def build() -> Server:
        servers.append(Server(toy_path, tmp_path_factory.mktemp("server") / "server.log"))
        return servers[-1]

    yield build
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def rowwise(new_server):
    server = new_server()
    server.start(*ROWWISE)
    return server.wait_until_up()


@pytest.fixture
def make_server_trainer(make_trainer):
    """Function from a server and overrides to a trainer on it that checks every sync."""

    def build(server: Server, **overrides):
        settings = {
            "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": server.url, "vllm_server_timeout": 300.0,
            "fp8_sync_check_interval": 1,
        }  # fmt: skip
        return make_trainer(**{**settings, **overrides})

    return build


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if "reward" in entry]


def distort(model, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1 + 0.2 * torch.randn(param.shape, generator=generator).to(param.device))


def mean_gap(first, second):
    return (torch.tensor(first) - torch.tensor(second)).abs().mean().item()


# Through files: training, syncs, refusals, a kill


@pytest.mark.vllm
@pytest.mark.slow
def test_trained_through_files(make_server_trainer, rowwise, tmp_path):
    trainer = make_server_trainer(rowwise, max_steps=12)
    generation = trainer.vllm_generation
    client = generation.vllm_client
    before = client.score(PROBE, 0)
    trainer.train()
    assert trainer.num_calibrations == 2 and trainer.num_rollouts == 3
    assert all(0 < gap < 0.05 for gap in logged(trainer, "sampling/sampling_logp_difference/mean"))
    assert all(0 < ratio <= 2.0 for ratio in logged(trainer, "sampling/importance_sampling_ratio/max"))

    distort(trainer.model)
    generation.sync_weights()  # checks itself
    gap = generation.check_sync()
    assert 0 < gap < 0.03
    # The server's numbers moved with the trainer's.
    assert mean_gap(client.score(PROBE, 0), before) > 5 * gap
    weights = client.score(PROBE, 0)
    generation.sync_weights()
    assert client.score(PROBE, 0) == weights  # a reload of unchanged weights changes nothing

    # One version, in a directory that only its user can read, and nothing else.
    (run,) = (tmp_path / "run" / "_weight_transfer").iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert sorted(path.name for path in run.iterdir()) == ["run.lock", "version-000005"]
    (shard,) = (run / "version-000005").iterdir()
    stored = load_file(shard)
    assert set(stored) == {name for name, _ in generation.named_weights()} >= {"lm_head.weight"}
    assert all(torch.equal(stored[name], param.bfloat16()) for name, param in generation.named_weights())
    generation._files.close()
    assert not run.exists()


@pytest.mark.vllm
@pytest.mark.slow
def test_dynamic_sampling_over_a_server(toy_path, toy_dataset, rowwise, tmp_path):
    """Rounds of different sizes through the server; every trained group has spread."""

    def half_uniform(prompts, completions, **kwargs):
        return [value * (int(p[0]) % 2 == 0) for p, value in zip(prompts, digits_reward(completions), strict=True)]

    args = CalibratedDAPOConfig(
        output_dir=str(tmp_path), **SETTINGS, mask_truncated_completions=False, dynamic_sampling_surplus=1,
        use_vllm=True, vllm_mode="server", vllm_server_base_url=rowwise.url, vllm_server_timeout=300.0,
    )  # fmt: skip
    trainer = CalibratedDAPOTrainer(toy_path, half_uniform, args, train_dataset=toy_dataset)
    trainer.train()
    assert trainer.num_rollouts == 2 and trainer.num_calibrations == 1 and trainer.num_cap_hits == 0
    assert logged(trainer, "dynamic_sampling/kept_groups") == [4.0, 4.0]
    assert max(logged(trainer, "dynamic_sampling/rounds")) > 1


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"fp8_recipe": "blockwise"}, "quantization fp8_per_channel .*'blockwise'.*`--quantization calclip_fp8_per_b"),
        ({"fp8_rollout": "off"}, r"is quantized \(fp8_per_channel\).*leave out `--quantization`"),
        (
            {"fp8_ignore": ["*.0.mlp.down_proj"]},
            r"""layers.0.mlp.down_proj.*`--quantization-config '\{"ignore": \["model.layers.0.mlp.down_proj"\]\}'`""",
        ),
        ({"vllm_max_model_length": 200}, "takes 80 tokens and the run needs 200: `--max-model-len 200`"),
        ({"max_completion_length": 80}, "`--max-model-len 81`"),
    ],
    ids=str,
)  # fmt: skip
def test_server_for_another_run_is_refused(make_server_trainer, rowwise, overrides, message):
    with pytest.raises(ValueError, match=message):
        make_server_trainer(rowwise, **overrides)


@pytest.mark.vllm
@pytest.mark.slow
def test_each_fault_of_a_server_names_its_flag(rowwise):
    information = ServerClient(rowwise.url, 0, 0.0).server_info()
    selection = Selection(fp8=["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"], bf16=[])
    blocks = get_recipe("blockwise")

    def problems(path=(), value=None, **overrides):
        changed = copy.deepcopy(information)
        place = changed
        for name in path[:-1]:
            place = place[name]
        if path:
            place[path[-1]] = value
        expected = {
            "recipe": get_recipe("rowwise"), "selection": selection, "min_length": 80, "transfer": "filesystem",
        }  # fmt: skip
        return server_problems(changed, **{**expected, **overrides})

    config = "vllm_config"
    assert problems() == []
    for path, value, flag in [
        ((config, "model_config", "logprobs_mode"), "raw_logprobs", "`--logprobs-mode processed_logprobs`"),
        ((config, "model_config", "dtype"), "torch.float16", "`--dtype bfloat16`"),
        ((config, "model_config", "quantization"), None, "quantization off.*`--quantization fp8_per_channel`"),
        ((config, "model_config", "quantization"), "fp8", "quantization fp8 .*`--quantization fp8_per_channel`"),
        ((config, "model_config", "quantization_config"), {"ignore": ["re:.*down_proj"]}, "no `--quantization-confi"),
        ((config, "model_config", "quantization_config"), {"targets": {"*": {}}}, "no `--quantization-config`"),
        ((config, "cache_config", "cache_dtype"), "fp8", "`--kv-cache-dtype auto`"),
        ((config, "load_config", "load_format"), "dummy", "`--load-format auto`"),
        ((config, "parallel_config", "data_parallel_external_lb"), True, "leave out `--data-parallel-external-lb`"),
        (("version",), "0.32.0", "runs vLLM 0.32.0"),
    ]:  # fmt: skip
        (problem,) = problems(path, value)
        assert re.search(flag, problem), (problem, flag)
    (problem,) = problems(transfer="nccl")
    assert """`--weight-transfer-config '{"backend": "nccl"}'`""" in problem
    # A GPU's server: the scheme is vLLM's own, and scales must be exact.
    information[config]["device_config"]["device"] = "cuda"
    information[config]["model_config"]["quantization"] = "fp8_per_block"
    (problem,) = problems(("vllm_env", "VLLM_USE_DEEP_GEMM_E8M0"), True, recipe=blocks)
    assert "`VLLM_USE_DEEP_GEMM_E8M0=0`" in problem
    assert problems(("vllm_env", "VLLM_USE_DEEP_GEMM_E8M0"), False, recipe=blocks) == []
    information[config]["model_config"]["quantization_config"] = {"ignore": ["*.down_proj"]}
    half = Selection(fp8=selection.fp8[:1], bf16=selection.fp8[1:])
    assert problems(("vllm_env", "VLLM_USE_DEEP_GEMM_E8M0"), False, recipe=blocks, selection=half) == []


@pytest.mark.vllm
@pytest.mark.slow
def test_base_weights_are_noticed_before_a_rollout(make_server_trainer, rowwise):
    """A server that was restarted between sync and rollout, as it looks from outside."""
    trainer = make_server_trainer(rowwise)
    generation = trainer.vllm_generation
    distort(trainer.model)
    generation.sync_weights()
    gap = generation.check_sync()
    client = generation.vllm_client
    client.reload_weights(rowwise.model)
    client.reset_prefix_cache()
    client.set_weight_version("default")
    generation.check_limit = 0.05  # log-probabilities of a random model are close together
    with pytest.raises(RuntimeError, match="does not compute with the trainer's weights"):
        generation.check_sync()
    prompt_ids, completion_ids, logprobs, _ = generation.generate([[5, 6, 7]] * 4, None, 4)
    assert generation.check_sync() == gap and generation.num_syncs == 2
    assert len(prompt_ids) == len(completion_ids) == len(logprobs) == 4
    assert all(len(ids) == len(row) and len(row[0]) == 1 for ids, row in zip(completion_ids, logprobs, strict=True))

    client.set_weight_version("somebody else's")
    with pytest.raises(RolloutServerError, match="Another run pushed its weights"):
        generation.generate([[5, 6, 7]] * 4, None, 4)


@pytest.mark.vllm
@pytest.mark.slow
def test_weights_that_do_not_arrive(make_server_trainer, rowwise, tmp_path):
    trainer = make_server_trainer(rowwise, fp8_weight_transfer_dir=str(tmp_path / "transfer"))
    generation = trainer.vllm_generation
    generation.sync_weights()
    client = generation.vllm_client
    before = client.score(PROBE, 0)
    with pytest.raises(RolloutServerError, match="must see this directory"):
        client.reload_weights(str(tmp_path / "elsewhere"))
    generation.sync_weights()  # the server is none the worse for it
    assert client.score(PROBE, 0) == before
    files, path = generation._files, generation._files.path
    files.path = str(tmp_path / "gone")
    with pytest.raises(
        RolloutServerError, match="could not be written below .*gone.*The server keeps the weights bef"
    ):
        generation.sync_weights()
    files.path = path
    assert client.score(PROBE, 0) == before


@pytest.mark.vllm
@pytest.mark.slow
def test_adapters_arrive_merged(make_server_trainer, rowwise):
    trainer = make_server_trainer(rowwise, trainer={"peft_config": LoraConfig(r=4, target_modules="all-linear")})
    generation = trainer.vllm_generation
    generation.sync_weights()
    before = generation.vllm_client.score(PROBE, 0)
    base = {name: param.clone() for name, param in trainer.model.named_parameters() if "base_layer" in name}
    with torch.no_grad():
        for name, param in trainer.model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.3, generator=torch.Generator().manual_seed(3))
    generation.sync_weights()
    gap = generation.check_sync()
    assert gap < 0.05 and mean_gap(generation.vllm_client.score(PROBE, 0), before) > 2 * gap
    parameters = dict(trainer.model.named_parameters())
    assert all(torch.equal(parameters[name], value) for name, value in base.items())


@pytest.mark.vllm
@pytest.mark.slow
def test_server_killed_and_restarted_in_mid_run(make_server_trainer, rowwise, caplog):
    calls = []

    def reward(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 2:
            rowwise.kill()
            rowwise.start(*ROWWISE)
        return digits_reward(completions)

    trainer = make_server_trainer(rowwise, trainer={"reward_funcs": reward}, max_steps=16)
    trainer.train()
    assert len(calls) == trainer.num_rollouts == 4 and trainer.state.global_step == 16
    assert "does not answer" in caplog.text and "was restarted; its weights are pushed again" in caplog.text
    assert all(0 < gap < 0.05 for gap in logged(trainer, "sampling/sampling_logp_difference/mean"))
    distort(trainer.model)
    trainer.vllm_generation.sync_weights()
    assert 0 < trainer.vllm_generation.check_sync() < 0.03


@pytest.mark.vllm
@pytest.mark.slow
def test_server_that_stays_away_ends_the_run_resumably(make_server_trainer, rowwise, tmp_path):
    def reward(completions, **kwargs):
        calls.append(len(completions))
        if len(calls) == 2:  # nobody listens there; the two ranks below lose a killed server
            trainer.vllm_generation.vllm_client.base_url = f"http://127.0.0.1:{free_port()}"
        return digits_reward(completions)

    calls = []
    trainer = make_server_trainer(
        rowwise, trainer={"reward_funcs": reward}, max_steps=16, vllm_server_timeout=3.0, save_strategy="no"
    )
    with pytest.raises(RolloutServerError, match=r"was not up within 3 s.*rollout of step 9.*checkpoint-8"):
        trainer.train()
    checkpoint = tmp_path / "run" / "checkpoint-8"
    assert read_state(checkpoint)["num_rollouts"] == 2 and trainer.state.global_step == 8
    stored = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(stored[name], param) for name, param in trainer.model.named_parameters())
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=False)["state"]
    now = trainer.optimizer.state_dict()["state"]
    assert all(torch.equal(saved[i]["exp_avg"], now[i]["exp_avg"]) for i in now) and saved.keys() == now.keys()

    calls = [0] * 10
    resumed = make_server_trainer(rowwise, trainer={"reward_funcs": reward}, max_steps=16)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 16 and resumed.num_rollouts == 4 and len(calls) == 12
    assert resumed.calibration_history[: len(trainer.calibration_history)] == trainer.calibration_history
    assert 0 < resumed.vllm_generation.probe_gap < 0.05


RANKS = """
import json, os, signal, sys
from datasets import Dataset
from trl_calclip import CalibratedGRPOConfig, CalibratedGRPOTrainer

model, output_dir, url, group = sys.argv[1:]
calls = []


def reward(completions, **_):
    calls.append(0)
    if len(calls) == 2 and trainer.accelerator.is_main_process:
        os.killpg(int(group), signal.SIGKILL)
    return [sum(c.count(d) for d in "02468") / max(len(c), 1) for c in completions]


args = CalibratedGRPOConfig(
    output_dir=output_dir, per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
    max_completion_length=8, learning_rate=1e-3, max_steps=12, calibration_interval=1, calibration_min_tokens=1,
    save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=7, use_vllm=True, vllm_mode="server",
    vllm_server_base_url=url, vllm_server_timeout=3.0,
)
dataset = Dataset.from_dict({"prompt": [f"{i % 10}+{i // 10}=" for i in range(64)]})
trainer = CalibratedGRPOTrainer(model, reward, args, train_dataset=dataset)
try:
    trainer.train()
    error = ""
except RuntimeError as raised:
    error = f"{type(raised).__name__}: {raised}"
result = {"error": error, "step": trainer.state.global_step, "gap": trainer.vllm_generation.probe_gap}
with open(f"{output_dir}/rank{trainer.accelerator.process_index}.json", "w") as file:
    json.dump(result, file)
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_error_reaches_every_rank(rowwise, toy_path, tmp_path):
    """Two gloo ranks, of which one talks to the server: its loss ends both, with a checkpoint."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RANKS))
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    command += ["--rdzv_endpoint", "127.0.0.1:0", str(script), toy_path, str(tmp_path), rowwise.url]
    run = subprocess.run(
        [*command, str(rowwise.process.pid)], capture_output=True, text=True, env=environment, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and first["step"] == 8 and 0 < first["gap"] < 0.05
    assert first["error"].startswith("RolloutServerError: The vLLM server at") and "checkpoint-8" in first["error"]
    assert (tmp_path / "checkpoint-8" / "trainer_state.json").exists()
    assert not any((tmp_path / "_weight_transfer").iterdir())


# Other servers


@pytest.mark.vllm
@pytest.mark.slow
def test_stand_in_of_the_plugin_and_ignored_layers(make_server_trainer, new_server):
    server = new_server()
    ignore = json.dumps({"ignore": ["model.layers.0.mlp.down_proj"], "targets": {}})
    server.start(
        "--quantization", "calclip_fp8_per_tensor", "--quantization-config", ignore,
        "--logprobs-mode", "processed_logprobs",
    )  # fmt: skip
    server.wait_until_up()
    trainer = make_server_trainer(server, fp8_recipe="tensorwise", fp8_ignore=["*.0.mlp.down_proj"])
    before = trainer.vllm_generation.vllm_client.score(PROBE, 0)
    distort(trainer.model)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    gap = trainer.vllm_generation.check_sync()
    assert 0 < gap < 0.05 and mean_gap(trainer.vllm_generation.vllm_client.score(PROBE, 0), before) > 3 * gap
    with pytest.raises(ValueError, match=r"""layers.0.mlp.down_proj.*no `--quantization-config`"""):
        make_server_trainer(server, fp8_recipe="tensorwise")
    server.kill()


@pytest.mark.vllm
@pytest.mark.slow
def test_bf16_server_with_raw_logprobs(make_server_trainer, new_server):
    server = new_server()
    server.start()
    server.wait_until_up()
    flags = r"`--quantization fp8_per_channel`.*\n.*raw_logprobs.*`--logprobs-mode processed_logprobs`"
    with pytest.raises(ValueError, match=flags):
        make_server_trainer(server)
    with pytest.raises(ValueError, match="raw_logprobs.*`--logprobs-mode processed_logprobs`") as refused:
        make_server_trainer(server, fp8_rollout="off")
    assert "quantization" not in str(refused.value)
    server.kill()


@pytest.mark.vllm
def test_no_server_at_all(make_server_trainer, new_server):
    with pytest.raises(RolloutServerError, match=r"was not up within 1 s \(`vllm_server_timeout`\)"):
        make_server_trainer(new_server(), vllm_server_timeout=1.0)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for the trainer and one for the server")
@pytest.mark.parametrize("transfer", ["nccl", "filesystem"])
def test_weights_reach_a_gpu(make_server_trainer, new_server, transfer):
    server = new_server()
    server.start(*ROWWISE, "--weight-transfer-config", '{"backend": "nccl"}', CUDA_VISIBLE_DEVICES="1")
    server.wait_until_up()
    trainer = make_server_trainer(server, use_cpu=False, fp8_weight_transfer=transfer)
    before = trainer.vllm_generation.vllm_client.score(PROBE, 0)
    trainer.train()
    distort(trainer.model)
    trainer.vllm_generation.sync_weights()
    gap = trainer.vllm_generation.check_sync()
    assert 0 < gap < 0.05 and mean_gap(trainer.vllm_generation.vllm_client.score(PROBE, 0), before) > 3 * gap
    server.kill()


# Files


def test_version_appears_when_it_is_complete(tmp_path):
    files = WeightFiles(str(tmp_path), shard_bytes=100)
    tensors = {f"{i}.weight": torch.full((n,), float(i)).bfloat16() for i, n in enumerate((20, 30, 200, 5))}
    writer = files.begin()
    for name, tensor in tensors.items():
        writer.add(name, tensor)
        assert not any(name.startswith("version") for name in os.listdir(files.path))
    path = writer.finish()
    # 40 and 60 bytes together, 400 alone, 10 alone
    shards = [load_file(os.path.join(path, name)) for name in sorted(os.listdir(path))]
    assert [sorted(shard) for shard in shards] == [["0.weight", "1.weight"], ["2.weight"], ["3.weight"]]
    assert all(torch.equal(tensors[name], value) for shard in shards for name, value in shard.items())
    with pytest.raises(ValueError, match="'a' was given twice"):
        writer = files.begin()
        for size in (200, 200):
            writer.add("a", torch.zeros(size))
    writer.abort()
    files.keep_only(files.begin().finish())
    assert sorted(os.listdir(files.path)) == ["run.lock", "version-000003"]
    files.close()
    assert os.listdir(tmp_path) == []


def test_only_leftovers_of_killed_runs_are_removed(tmp_path):
    code = (
        "import os, signal, sys, torch\n"
        "from trl_calclip.fp8.weight_files import WeightFiles\n"
        "files = WeightFiles(sys.argv[1])\n"
        "writer = files.begin()\n"
        "writer.add('a', torch.zeros(9))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    (leftover,) = os.listdir(tmp_path)
    assert sorted(os.listdir(tmp_path / leftover)) == [".version-000001.partial", "run.lock"]

    outside = tmp_path / "outside"
    for directory in (outside, tmp_path / f"{PREFIX}nobody", tmp_path / "something-else"):
        directory.mkdir()
    (outside / "run.lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(outside)
    (tmp_path / f"{PREFIX}nobody" / "data").touch()  # a name like ours, without a lock
    (tmp_path / "something-else" / "run.lock").touch()
    (tmp_path / f"{PREFIX}file").touch()
    files = WeightFiles(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["outside", "something-else", *(f"{PREFIX}{name}" for name in ("nobody", "link", "file")),
         os.path.basename(files.path)]
    )  # fmt: skip
    assert remove_leftovers(str(tmp_path)) == []  # a live run's stays
    assert (outside / "run.lock").exists()

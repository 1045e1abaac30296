# Copyright 2026 The trl-calclip authors. Licensed under the Apache License, Version 2.0.
"""FP8 on both sides of the importance ratio: torchao in the trainer, vLLM in the rollout."""

"""What a script may do with values that nobody knows: it ends, and gets plausible ones."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_nets.scripts import Write

import fxmem
from fxmem import ScriptRun, TraceError
from fxmem.scripts import reads

Run = Callable[..., ScriptRun]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(text: str, **options: object) -> ScriptRun:
        path = tmp_path / "train.py"
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text))
        return fxmem.run(str(path), **options)  # type: ignore[arg-type]

    return run


# transformers.GenerationMixin._sample, with its StoppingCriteriaList
GENERATE = """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100)).to(device)
    tokens = torch.full((4, 7), 5).to(device)
    unfinished = torch.ones(4, dtype=torch.long, device=device)
    end = torch.tensor([2], device=device)
    while True:
        scores = model(tokens)[:, -1]
        chosen = {choose} * unfinished + (1 - unfinished)
        tokens = torch.cat([tokens, chosen[:, None]], -1)
        is_done = torch.full((4,), False, device=device, dtype=torch.bool)
        is_done = is_done | torch.full((4,), tokens.shape[1] >= 12, device=device)
        is_done = is_done | torch.isin(tokens[:, -1], end)
        unfinished = unfinished & ~is_done
        if unfinished.max() == 0:
            break
    print(tokens.shape)
    model(tokens).sum().backward()
"""


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("choose", ["scores.argmax(-1)", "scores.softmax(-1).multinomial(1)[:, 0]"])
def test_text_is_generated_to_its_greatest_length(
    run: Run, capsys: pytest.CaptureFixture[str], device: str, choose: str
) -> None:
    run(GENERATE.format(choose=choose), device=device)
    assert capsys.readouterr().out == "torch.Size([4, 12])\n"


ENDLESS = """
    x = torch.randn(2, 2, requires_grad=True, device="cuda")
    loss = (x * x).sum()
    {loop}
        pass
"""


@pytest.mark.parametrize(
    "loop",
    ["while loss > 0.1:", "while not (loss < 0.1).all():", "while float(loss.detach()) > 0.1:"],
)
def test_a_loop_that_waits_for_a_value_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr(reads, "_MOST_ROUNDS", 50)
    monkeypatch.setattr(reads, "_MOST_OPERATORS", 100)
    with pytest.raises(
        TraceError, match=r"reads a value at train\.py:6 .* after \d+ reads"
    ) as info:
        run(ENDLESS.format(loop=loop))
    assert info.value.hint == "end it after a number of rounds"


def test_a_loop_over_data_may_read_as_often_as_it_likes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_MOST_ROUNDS", 5)
    monkeypatch.setattr(reads, "_MOST_OPERATORS", 10)
    run("""
        x = torch.randn(30, requires_grad=True, device="cuda")
        right = 0
        while not right:
            for each in x:
                right += each.item() == 1
        x.sum().backward()
    """)


def test_arrays_of_any_size_hold_numbers_up_to_1_and_text_and_masks_ones(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("""
        import numpy as np

        x = torch.randn(2**12, 2**12, requires_grad=True, device="cuda")
        x.sum().backward()
        for array in (x.detach().cpu().numpy(), np.asarray(x.detach().cpu()), x.tolist()):
            print(len(array), len(array[5]), 0.75 <= array[5][7] <= 1, end=" ")
        print(x.bool().cpu().numpy()[3, 3], x.long().cpu()[3, 3].item(), end=" ")
        print(torch.ones(2, 2, device="cuda").tolist())
    """)
    expected = "4096 4096 True " * 3 + "True 1 [[1.0, 1.0], [1.0, 1.0]]\n"
    assert capsys.readouterr().out == expected


def test_copies_are_what_numpy_inverts_and_draws_by(run: Run) -> None:
    """As agents choose an action, and as Gaussian mixtures and metrics of classes are computed."""
    run("""
        import numpy as np

        policy = nn.Linear(8, 4).cuda()
        inputs = torch.randn(64, 8).cuda()
        scores = policy(inputs)
        logs, classes = scores.log_softmax(1), scores.view(4, 4, 16).softmax(1)
        mixed = 0.5 * (scores.softmax(1) + policy(2 * inputs).softmax(1))
        for rows in (
            scores.softmax(1).detach().cpu(),
            torch.exp(logs).data.cpu(),
            logs.detach().cpu().exp(),
            mixed.detach()[torch.arange(9)].cpu(),
            classes.detach().permute(0, 2, 1).reshape(-1, 4).cpu(),
            torch.cat([scores.softmax(1), scores.softmax(1)]).detach().float().cpu(),
            torch.distributions.Categorical(logits=scores).probs.detach().cpu(),
        ):
            assert np.allclose(rows.numpy().sum(1), 1)
        assert np.allclose(classes.detach().cpu().numpy().sum(1), 1)
        assert scores[0, 0].softmax(0).item() <= 1
        assert np.random.choice(4, p=scores.softmax(1)[0].tolist()) in range(4)
        assert np.isfinite(np.linalg.inv((scores.T @ scores).detach().cpu().numpy())).all()
        chances = scores.sigmoid().detach().cpu().numpy()
        assert chances.min() >= 0 and chances.max() <= 1 and chances.std() > 0
        scores.sum().backward()
    """)


def test_indices_that_are_copied_differ(run: Run) -> None:
    """As those of the samples that active learning has labelled next."""
    run("""
        scores = torch.randn(3, 64, requires_grad=True, device="cuda")
        assert len(set(scores[0].topk(9).indices.tolist())) == 9
        order = scores.argsort(dim=1, descending=True)
        halves = (order[1, :32].cpu().numpy(), order[1, 32:].cpu().numpy())
        assert sorted([*halves[0], *halves[1]]) == list(range(64))
        assert sorted(torch.randperm(64, device="cuda").cpu().tolist()) == list(range(64))
        rows, columns = torch.where(scores > 0)
        assert rows.max().item() == 2 and len(set(columns.tolist())) == 64
        assert torch.where(scores[0] > 0)[0].tolist() == list(range(64))
        last = order[0][(scores[0, 62:63] > 0).nonzero().squeeze() + 63]  # in SSD's box_nms
        scores.sum().backward()
    """)


def test_an_assertion_of_a_number_passes(run: Run) -> None:
    run("""
        scores = torch.randn(3, 64, requires_grad=True, device="cuda")
        best = scores.sum(1).argmax().item()
        assert best == 7 and scores.sum().item() < 0.5
        if best > 0.5:
            raise ValueError
        scores.sum().backward()
    """)


@pytest.mark.parametrize(
    "guard",
    [
        "if loss.item() > 0.01: print('Early stopping'); break",  # PPO of Spinning Up
        "if loss.item() > 0.01: continue",
        "if loss.item() < 0.5: loss.backward(); optimizer.step()",  # a GAN's discriminator
    ],
)
def test_a_number_lets_training_go_on(write: Write, guard: str) -> None:
    text = """
        model = make_model().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(4):
            loss = model(torch.randn(2, 3, 32, 32).cuda()).sum()
            GUARD
    """
    rest = "" if "step()" in guard else "; loss.backward(); optimizer.step()"
    lines = text.replace("GUARD", guard + rest.replace("; ", "\n            "))
    assert len(fxmem.run(str(write(lines))).steps) == 3


def test_numbers_are_within_what_their_operators_make(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As sizes of YOLO's multi-scale training, and the range of a quantized activation."""
    run("""
        scores = torch.randn(8, requires_grad=True, device="cuda")
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        scaler.scale(scores.sum())
        size = 32 * torch.randint(5, 8, (1,), device="cuda").item()
        chance = scores[0].sigmoid().item()
        print(size, scores.max().item() - scores.min().item(), chance, scaler.get_scale())
        scores.sum().backward()
    """)
    assert capsys.readouterr().out == "224 0.25 0.75 8.0\n"


def test_a_test_as_a_whole_is_false_and_a_while_goes_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("""
        x = torch.randn(4, requires_grad=True, device="cuda")
        rounds, finished = 0, not (x > 0).any()
        while (x > 1).any() and rounds < 7:
            rounds += 1
        if not (x > 0).any().item():
            rounds = 0
        print(rounds, finished, 1 if (x > 0).any() else 2)
        x.sum().backward()
    """)
    assert capsys.readouterr().out == "7 False 2\n"


def test_values_that_are_drawn_until_they_are_right_are_so_at_once(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``trunc_normal_`` draws them from torch 2.13 on."""
    run("""
        x = torch.randn(4, requires_grad=True, device="cuda")
        rounds = 0
        while True:
            rounds += 1
            wrong = (torch.randn_like(x) > 2) | (x < -2)
            if not wrong.any():
                break
            x = torch.where(wrong, 0.0, x)
        print(rounds)
        x.sum().backward()
    """)
    assert capsys.readouterr().out == "1\n"


def test_loops_that_stop_early_run_to_their_end(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As hqq searches the scales of weights: the longest run takes the most."""
    run("""
        x = torch.randn(4, requires_grad=True, device="cuda")
        best = 1e4
        for rounds in range(20):
            error = float((x * rounds).abs().mean().detach())
            if error < best:
                best = error
            else:
                break
        print(rounds)
        for rounds in range(20):
            if (x > 0).any():
                rounds += 1
            else:
                break
        print(rounds)
        x.sum().backward()
    """)
    assert capsys.readouterr().out == "1\n20\n"


def test_what_is_read_is_within_what_it_may_be(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("""
        x = torch.randn(4, requires_grad=True, device="cuda")
        count = 3 + (x > 0).sum()
        print(count.item(), x[: (x > 0).sum()].shape, (x > 0).long().add(5).tolist())
        x.sum().backward()
    """)
    assert capsys.readouterr().out == "3 torch.Size([4]) [5, 5, 5, 5]\n"


def test_a_confusion_matrix_has_the_size_that_was_said(run: Run) -> None:  # torchmetrics' too
    run("""
        x = torch.randn(64, 5, requires_grad=True, device="cuda")
        y = torch.randint(0, 5, (64,)).cuda()
        matrix = torch.bincount(y * 5 + x.argmax(1), minlength=25).reshape(5, 5)
        print((matrix.diag().sum() / matrix.sum()).item())
        x.sum().backward()
    """)


def test_sums_of_sparse_tensors_are_not_known(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("""
        weight = torch.ones(3, requires_grad=True, device="cuda")
        places = torch.arange(3, device="cuda").expand(2, 3)
        options = {"is_coalesced": True, "check_invariants": False}
        matrix = torch.sparse_coo_tensor(places, weight.detach() * 2, (4, 4), **options)
        print(matrix.to_dense().sum().item())
        weight.new().new_ones(1)
        weight.sum().backward()
    """)
    assert capsys.readouterr().out == "1.0\n"  # as any number that is not known


def test_numbers_of_a_schedule_are_known(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """As torchsde looks at the times that it is given, and samplers of diffusion at their noise."""
    run("""
        times = torch.linspace(0, 1, 5).to("cuda")
        weight = torch.ones(4, requires_grad=True, device="cuda")
        print(all(a < b for a, b in zip(times, times[1:])), times[3].item())
        (weight * times[2]).sum().backward()
    """)
    assert capsys.readouterr().out == "True 0.75\n"


def test_the_greatest_of_chosen_numbers_may_be_the_last(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the graphs of the nodes that ``TopKPooling`` of PyG keeps."""
    run("""
        scores = torch.randn(8, requires_grad=True, device="cuda")
        graphs = torch.arange(4).repeat(2).cuda()
        kept = graphs[scores.argsort()[:4]]
        pooled = torch.arange(4, device="cuda").scatter_(0, scores[:4].argsort(), kept)
        for each in (kept, pooled, kept.sort().values):
            print(int(each.max()) + 1)
        scores.sum().backward()
    """)
    assert capsys.readouterr().out == "4\n4\n4\n"


def test_not_all_numbers_are_zeros(run: Run) -> None:
    """Prodigy (prodigyopt 1.1) keeps a copy of each weight that is not."""
    text = """
    weight = torch.randn(512, 512, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
        if not optimizer.state[weight]:
            is_wrong = weight.isnan().any()
            optimizer.state[weight]["p0"] = weight.detach().clone() if weight.any() else is_wrong
    """
    (*_, last) = run(text).steps
    states = [s for s in last.graph.storages if s.category is fxmem.Category.OPTIMIZER_STATE]
    assert [state.nbytes for state in states] == [512 * 512 * 4]


@pytest.mark.parametrize(
    "guard",
    [
        "not torch.isnan(loss)",
        "torch.isfinite(loss).item()",
        "~(torch.isnan(loss) | torch.isinf(loss))",  # normflows' README
        "torch.isnan(loss).sum() == 0",
        "loss == loss",
        "loss != 0",
        "loss < 1e4 and not loss.isinf()",
    ],
)
def test_a_guard_lets_training_go_on(run: Run, guard: str) -> None:
    text = f"""
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        loss = weight.square().sum()
        if {guard}:
            loss.backward()
            optimizer.step()
    """
    assert len(run(text).steps) == 3


def test_a_script_whose_optimizer_never_steps_is_told(run: Run) -> None:
    text = """
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.square().sum().backward()
    """
    note = "No optimizer stepped: all that ran is one step."
    assert note in run(text).notes
    assert note not in run(text.replace("backward()", "backward(); optimizer.step()")).notes


def test_what_a_mask_finds_is_computed(run: Run) -> None:
    """As nflows' splines; without the branch there is no loss to go back from."""
    text = """
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    result = torch.zeros_like(weight)
    inside = (weight >= -3) & (weight <= 3)
    if torch.any(inside):
        result[inside] = torch.tanh(weight[inside])
    result.sum().backward()
    """
    assert len(run(text).steps) == 1


@pytest.mark.parametrize(
    "addition", ["loss += extra", "loss = loss + extra", "losses.append(extra)"]
)
def test_what_is_added_to_a_loss_is_computed(
    run: Run, capsys: pytest.CaptureFixture[str], addition: str
) -> None:
    """As heads of detectors do where there are positive samples."""
    text = f"""
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    head = torch.randn(64, 64, device="cuda", requires_grad=True)
    score = weight.square().sum()
    loss, losses = score * 1, [score]
    if (weight > 0.5).sum() / 2 > score:
        extra = head.square().sum()
        {addition}
    (loss + sum(losses)).backward()
    print(head.grad is not None)
    """
    run(text)
    assert capsys.readouterr().out == "True\n"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("1 / (1 - rate.sum().item())", "ZeroDivisionError: float division by zero"),
        # an agent's action, for which NumPy's code in Cython raises
        (
            "np.random.choice(4, p=rate.double().cpu().numpy())",
            "ValueError: probabilities do not sum to 1",
        ),
    ],
)
def test_an_error_of_a_line_that_read_values_tells_what_was_read(
    run: Run, line: str, error: str
) -> None:
    text = f"""
    import numpy as np
    rate = torch.randn(4, device="cuda").square()
    {line}
    """
    with pytest.raises(TraceError, match=f"^train.py failed at train.py:6: {error} ") as raised:
        run(text)
    assert str(raised.value.hint).startswith("values read there are not known, and were taken as ")


def test_a_mask_of_a_few_set_elements_finds_so_many(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """As torchvision's ``BalancedPositiveNegativeSampler``; Mask R-CNN took 13 GiB, and 4."""
    text = """
    scores = torch.randn(2000, device="cuda", requires_grad=True)
    inside, outside = torch.where(scores >= 0.5)[0], torch.where(scores < 0.5)[0]
    masks = [torch.zeros(2000, dtype=torch.uint8, device="cuda") for _ in range(2)]
    masks[0][inside[:128]] = 1
    masks[1][outside[torch.randperm(len(outside), device="cuda")[:384]]] = 1
    kept = torch.where(masks[0] | masks[1])[0]
    pairs = masks[0][:2] | masks[0][:2, None]
    assert len(torch.where(torch.cat(masks))[0]) == 512
    print(len(kept), len(scores[masks[0].bool()]), len(masks[0].nonzero()), len(pairs.nonzero()))
    part = masks[0][10:]
    part.fill_(1)
    print(len(masks[0].nonzero()))
    scores[kept].sum().backward()
    """
    run(text)
    assert capsys.readouterr().out == "512 128 128 4\n2000\n"

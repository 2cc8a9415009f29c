"""Examples of PyTorch: ImageNet, the torchrun tutorial, T5 under FSDP, and DCGAN."""

from __future__ import annotations

from edits import after, before, replace, swap
from script import Edits, Script


def _imagenet(strategy: str) -> Edits:
    sample = "sample=torch.zeros(2, 3, 8, 8)"
    call = f'mw.parallelize(model, "{strategy}", optimizer=optimizer, scheduler=scheduler, {sample})'
    return {
        "main.py": [
            after("from torch.utils.data import Subset", "import meshwright as mw"),
            after("scheduler = StepLR(", f"model, optimizer, scheduler = {call}"),
            before("    if args.evaluate:", "train_loader = model.divide(train_loader)"),
            replace("save_checkpoint({", "model.save('checkpoint')", until="}, is_best)"),
        ]
    }


IMAGENET = Script(
    name="ImageNet",
    repository="pytorch+examples",
    folder="imagenet",
    main="main.py",
    files=[],
    arguments=["images", "-b", "8", "--epochs", "1", "-j", "0", "--seed", "1", "--lr", "0.02"],
    accelerate={
        "main.py": [
            after("from torch.utils.data import Subset", "from accelerate import Accelerator"),
            after("scheduler = StepLR(", "accelerator = Accelerator(cpu=True)", "device = accelerator.device"),
            before("    if args.evaluate:", "model, optimizer, train_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, scheduler)"),
            swap("loss.backward()", "Accelerator().backward(loss)"),
            swap("if not args.multiprocessing_distributed or (args", "if accelerator.is_main_process and not args.multiprocessing_distributed or (args"),
        ]
    },
    own_loop=_imagenet,
)  # fmt: skip


def _torchrun(strategy: str) -> Edits:
    call = f'mw.parallelize(self.model, "{strategy}", optimizer=self.optimizer, sample=torch.zeros(2, 20))'
    return {
        "multigpu_torchrun.py": [
            replace("from torch.nn.parallel import Dist", "import meshwright as mw"),
            replace("self.model = DDP(", f"self.model, self.optimizer = {call}",
                    "self.train_data = self.model.divide(self.train_data)"),
            swap("DistributedSampler(dataset)", "DistributedSampler(dataset, 1, 0)"),
            swap("self.model.module.state_dict()", "self.model.state_dict()"),
            swap("torch.save(snapshot, self", "if self.gpu_id == 0: torch.save(snapshot, self"),
            swap("if self.gpu_id == 0 and epoch", "if epoch"),
        ]
    }  # fmt: skip


TORCHRUN = Script(
    name="torchrun tutorial",
    repository="pytorch+examples",
    folder="distributed/ddp-tutorial-series",
    main="multigpu_torchrun.py",
    files=["datautils.py"],
    arguments=["2", "5", "--batch_size", "16"],
    setting={
        "multigpu_torchrun.py": [
            swap("MyTrainDataset(2048)", "MyTrainDataset(64)"),
            before("model = torch.nn.Linear(20, 1)", "torch.manual_seed(0)"),
        ]
    },
    accelerate={
        "multigpu_torchrun.py": [
            replace("from torch.nn.parallel import Dist", "from accelerate import Accelerator"),
            replace("from torch.distributed import init_process"),
            replace("def ddp_setup():", until="init_process_group("),
            replace('self.gpu_id = int(os.environ["LOCAL_RANK"])', "self.accelerator = Accelerator(cpu=True)", "self.gpu_id = self.accelerator.device"),
            replace("self.model = DDP(", "self.model, self.optimizer, self.train_data = self.accelerator.prepare(self.model, self.optimizer, self.train_data)"),
            swap("loss.backward()", "self.accelerator.backward(loss)"),
            replace("self.train_data.sampler.set_epoch(epoch)"),
            swap("self.model.module.state_dict()", "self.accelerator.unwrap_model(self.model).state_dict()"),
            swap("if self.gpu_id == 0 and epoch", "if self.accelerator.is_main_process and epoch"),
            swap("shuffle=False,", "shuffle=True,"),
            replace("sampler=DistributedSampler(dataset)"),
            replace("    ddp_setup()"),
            replace("    destroy_process_group()"),
        ]
    },
    own_loop=_torchrun,
    as_ranks=True,
)  # fmt: skip

FOUND = "model, optimizer, scheduler = "


def _t5(strategy: str) -> Edits:
    ids = "torch.zeros(2, 8, dtype=torch.long)"
    sample = f"sample=dict(input_ids={ids}, attention_mask={ids} + 1, labels={ids})"
    call = f'mw.parallelize(model, "{strategy}", optimizer=optimizer, scheduler=scheduler, {sample})'
    return {
        "T5_training.py": [
            replace("from torch.nn.parallel import Dist", "import meshwright as mw"),
            swap("rank=rank, num_replicas=world_size", "rank=0, num_replicas=1", every=True),
            replace("# Apply FSDP wrapping", until="limit_all_gathers=fsdp_config"),
            after("scheduler = StepLR(", FOUND + call, "train_loader = model.divide(train_loader)"),
        ]
    }


T5 = Script(
    name="FSDP T5",
    repository="pytorch+examples",
    folder="distributed/FSDP",
    main="T5_training.py",
    files=["configs", "model_checkpointing", "policies", "utils", "summarization_dataset.py"],
    arguments=["--epochs", "1", "--batch-size", "8", "--track_memory"],
    setting={"T5_training.py": [swap("'num_workers': 2", "'num_workers': 0")]},
    accelerate={
        "T5_training.py": [
            replace("from torch.nn.parallel import Dist", "from accelerate import Accelerator"),
            replace("sampler1 = Dist", "sampler1 = torch.utils.data.RandomSampler(train_dataset)"),
            replace("sampler2 = Dist", "sampler2 = None"),
            replace("    setup()", "accelerator = Accelerator(cpu=True)"),
            replace("# Apply FSDP wrapping", until="limit_all_gathers=fsdp_config"),
            after("scheduler = StepLR(", "model, optimizer, train_loader, val_loader, scheduler = accelerator.prepare(model, optimizer, train_loader, val_loader, scheduler)"),
            swap("= train(args, model", "= train(accelerator, args, model"),
            replace("    cleanup()", "accelerator.end_training()"),
        ],
        "utils/train_utils.py": [
            replace("        sampler.set_epoch(epoch)", "    pass"),
            swap("loss.backward()", "accelerator.backward(loss)"),
            swap("def train(args, model", "def train(accelerator, args, model"),
        ],
    },
    own_loop=_t5,
    as_ranks=True,
)  # fmt: skip


def _dcgan(strategy: str) -> Edits:
    image, noise = "torch.zeros(2, nc, opt.imageSize, opt.imageSize)", "torch.zeros(2, nz, 1, 1)"
    lines = [
        f'net{one}, optimizer{one} = mw.parallelize(net{one}, "{strategy}", optimizer=optimizer{one}, sample={sample})'
        for one, sample in (("D", image), ("G", noise))
    ]
    return {
        "main.py": [
            after("import torchvision.utils as vutils", "import meshwright as mw"),
            before("for epoch in range(opt.niter)", *lines, "dataloader = netD.divide(dataloader)"),
            swap("noise = torch.randn(batch_size, nz, 1, 1, device=device)", "noise = torch.randn(batch_size * netD.data_ranks, nz, 1, 1, device=device).chunk(netD.data_ranks)[netD.data_rank]"),
        ]
    }  # fmt: skip


DCGAN = Script(
    name="DCGAN",
    repository="pytorch+examples",
    folder="dcgan",
    main="main.py",
    files=[],
    arguments=["--dataset", "fake", "--batchSize", "8", "--ngf", "4", "--ndf", "4", "--nz", "8", "--niter", "1",
               "--manualSeed", "1", "--workers", "0", "--outf", "out"],
    setting={"main.py": [swap("dset.FakeData(image_size", "dset.FakeData(16, image_size")]},
    accelerate={
        "main.py": [
            after("import torchvision.utils as vutils", "from accelerate import Accelerator"),
            before("for epoch in range(opt.niter)", "accelerator = Accelerator(cpu=True)", "device = accelerator.device",
                   "netD, netG, optimizerD, optimizerG, dataloader = accelerator.prepare(netD, netG, optimizerD, optimizerG, dataloader)"),
            swap("errD_real.backward()", "accelerator.backward(errD_real)"),
            swap("errD_fake.backward()", "accelerator.backward(errD_fake)"),
            swap("errG.backward()", "accelerator.backward(errG)"),
            swap("torch.save(netG.state_dict()", "accelerator.save(accelerator.unwrap_model(netG).state_dict()"),
            swap("torch.save(netD.state_dict()", "accelerator.save(accelerator.unwrap_model(netD).state_dict()"),
        ]
    },
    own_loop=_dcgan,
)  # fmt: skip

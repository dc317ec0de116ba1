"""One rank of an exported plan, as torchrun starts it: python -m planner.probe.worker --config plan.torch.yaml."""

from planner.probe.launch.exported import main

if __name__ == "__main__":
    raise SystemExit(main())

"""From captured graphs to graphs: layouts, passes, and which operators become confpred's."""

"""The tool a person types: compose, plan, launch, measure, rank."""

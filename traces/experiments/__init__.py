"""Series of simulations: `moonserve simulate | plan | reproduce`. Pure: plan_search.py and the published figures."""

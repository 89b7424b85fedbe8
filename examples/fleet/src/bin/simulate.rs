//! `just simulate`: routing strategies on simulated engines, in virtual time.

use std::process::ExitCode;

use warmroute_fleet::simulator::args::{self, ArgsError, SIMULATE_HELP, SimulateArgs};
use warmroute_fleet::simulator::{chart, compare};

fn main() -> ExitCode {
    let parsed = SimulateArgs::parse(std::env::args().skip(1));
    let args = match args::or_help(parsed, SIMULATE_HELP) {
        Ok(args) => args,
        Err(code) => return code,
    };
    match simulate(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn simulate(args: &SimulateArgs) -> Result<(), ArgsError> {
    let comparison = compare::compare(args, |line| eprintln!("{line}"))?;
    println!("{}\n", comparison.facts);
    print!("{}", chart::table(&comparison.rows));
    let rows: Vec<_> = comparison
        .rows
        .iter()
        .map(|(policy, summary)| serde_json::json!({"policy": policy, "figures": summary}))
        .collect();
    let report = serde_json::json!({"facts": comparison.facts, "seeds": args.seeds, "rows": rows});
    args::write_report("simulate.json", &format!("{report:#}\n"))?;
    args::write_report("simulate.csv", &chart::csv(&comparison.rows))?;
    let page = chart::page("Routing strategies compared", &comparison.facts, &comparison.rows);
    let path = args::write_report("simulate.html", &page)?;
    println!("\nCharts: {}", path.display());
    Ok(())
}

//! `just replay`: what each routing strategy would have made of a log.

use std::process::ExitCode;

use warmroute_fleet::simulator::replay::{HELP, ReplayArgs, ReplayError};
use warmroute_fleet::simulator::{args, chart};

fn main() -> ExitCode {
    let parsed = ReplayArgs::parse(std::env::args().skip(1));
    let args = match args::or_help(parsed, HELP) {
        Ok(args) => args,
        Err(code) => return code,
    };
    match replay(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn replay(args: &ReplayArgs) -> Result<(), ReplayError> {
    let replayed = args.run(|line| eprintln!("{line}"))?;
    println!("{}\n", replayed.facts);
    print!("{}", chart::table(&replayed.rows));
    let rows: Vec<_> = replayed
        .rows
        .iter()
        .map(|(policy, summary)| serde_json::json!({"policy": policy, "figures": summary}))
        .collect();
    let report = serde_json::json!({"facts": replayed.facts, "rows": rows});
    args::write_report("replay.json", &format!("{report:#}\n")).map_err(ReplayError::Args)?;
    let page = chart::page(
        "What each strategy would have made of the log",
        &replayed.facts,
        &replayed.rows,
    );
    let path = args::write_report("replay.html", &page).map_err(ReplayError::Args)?;
    println!("\nCharts: {}", path.display());
    Ok(())
}

//! The module as it ships: its size, what it asks of Envoy, what it offers, and which of its functions can panic.
//!
//! The lists in `tests/golden/` are written by hand; a failure prints the lines to add and to remove.
#![cfg(not(target_family = "wasm"))]
#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of a test may fail and report as tests do"
)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::process::Command;

use warmroute_fleet::process::{run, workspace_root};
use warmroute_fleet::wasm::{WASM_TARGET, build_wasm};
use wasmparser::{ExternalKind, FuncType, KnownCustom, Name, Operator, Parser, Payload, TypeRef};

#[test]
fn the_shipped_module_is_small_enough() {
    let size_bytes = shipped().len();
    println!("the shipped module has {size_bytes} bytes of at most {MAX_MODULE_BYTES}");
    assert!(
        size_bytes <= MAX_MODULE_BYTES,
        "{size_bytes} bytes are more than {MAX_MODULE_BYTES}"
    );
}

#[test]
fn imports_are_those_of_the_committed_list() {
    let bytes = shipped();
    assert_lines(
        "imports.txt",
        &Module::parse(&bytes).imports.into_iter().collect(),
    );
}

#[test]
fn exports_are_what_envoy_calls() {
    let bytes = shipped();
    let exports = Module::parse(&bytes).exports;
    let missing: Vec<_> = EXPORTS.iter().filter(|name| !exports.contains(**name)).collect();
    assert!(
        missing.is_empty(),
        "not exported: {missing:?}\nexported: {exports:?}"
    );
}

#[test]
fn functions_that_can_panic_are_those_of_the_committed_list() {
    let bytes = named();
    let module = Module::parse(&bytes);
    // Order, and which equal functions are merged, depends on hashes of the build's settings, so neither the bytes nor
    // the exact numbers can be compared.
    let (named, shipped) = (module.functions.len(), Module::parse(&shipped()).functions.len());
    assert!(
        named.abs_diff(shipped) * 50 <= shipped,
        "the module with names has {named} functions and the one that ships {shipped}: it proves nothing about that"
    );
    let graph = CallGraph::new(&module);
    assert!(
        graph
            .panic_callers()
            .any(|(caller, _)| crate_of(caller) == "proxy_wasm"),
        "the SDK is known to panic; an analysis that does not see it sees nothing"
    );
    let mut found = BTreeSet::new();
    for (caller, sink) in graph.panic_callers() {
        let line = match crate_of(caller) {
            "proxy_wasm" => continue,
            owner if is_out_of_memory(sink) => format!("{owner}: out of memory"),
            "warmroute" => format!("{caller} -> {sink}"),
            // Which of another crate's functions stand for themselves is up to the optimiser: the crate is enough.
            owner => format!("{owner}: panics"),
        };
        found.insert(line);
    }
    for (owner, functions) in graph.transitive_callers() {
        println!(
            "{owner}: {} functions reach a panic through others",
            functions.len()
        );
    }
    // What the optimiser inlines differs with the folder that the project is built in, so a line may be missing; a line
    // that is not explained may not be there.
    let explained = committed("panics.txt");
    let unexplained: Vec<_> = found.difference(&explained).collect();
    println!(
        "only in the list: {:#?}",
        explained.difference(&found).collect::<Vec<_>>()
    );
    assert!(
        unexplained.is_empty(),
        "tests/golden/panics.txt explains nothing of {unexplained:#?}"
    );
}

/// What the analyses need of a module.
#[derive(Debug, Default)]
struct Module {
    /// `module.name (params) -> (results)`.
    imports: Vec<String>,
    exports: BTreeSet<String>,
    /// Demangled names by function index.
    names: BTreeMap<u32, String>,
    functions: BTreeMap<u32, Function>,
}

/// A function that the module defines.
#[derive(Debug)]
struct Function {
    /// Indices of the functions that it calls by name.
    calls: BTreeSet<u32>,
    /// Whether control never comes back from it.
    diverges: bool,
}

impl Module {
    fn parse(bytes: &[u8]) -> Self {
        let mut module = Self::default();
        let mut types: Vec<FuncType> = Vec::new();
        let mut imported_functions = 0;
        let mut next_function = 0;
        for payload in Parser::new(0).parse_all(bytes) {
            match payload.expect("the module is well formed") {
                Payload::TypeSection(section) => {
                    types.extend(
                        section
                            .into_iter_err_on_gc_types()
                            .map(|ty| ty.expect("a function type")),
                    );
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        let import = import.expect("an import");
                        let signature = match import.ty {
                            TypeRef::Func(index) => {
                                imported_functions += 1;
                                signature(types.get(index as usize).expect("the type of an import"))
                            }
                            other => format!("{other:?}"),
                        };
                        module
                            .imports
                            .push(format!("{}.{} {signature}", import.module, import.name));
                    }
                    next_function = imported_functions;
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export.expect("an export");
                        if matches!(export.kind, ExternalKind::Func | ExternalKind::Memory) {
                            module.exports.insert(export.name.to_owned());
                        }
                    }
                }
                Payload::CodeSectionEntry(body) => {
                    let operators = body.get_operators_reader().expect("a function body");
                    let operators: Vec<Operator> = operators
                        .into_iter()
                        .map(|operator| operator.expect("an operator"))
                        .collect();
                    module.functions.insert(next_function, Function::of(&operators));
                    next_function += 1;
                }
                Payload::CustomSection(section) => {
                    if let KnownCustom::Name(names) = section.as_known() {
                        for subsection in names {
                            let Name::Function(names) = subsection.expect("a name subsection") else {
                                continue;
                            };
                            for naming in names {
                                let naming = naming.expect("a name");
                                module.names.insert(naming.index, demangled(naming.name));
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        module
    }
}

impl Function {
    fn of(operators: &[Operator<'_>]) -> Self {
        let mut calls = BTreeSet::new();
        let mut returns = false;
        // Blocks that are open; a branch out of all of them leaves the function.
        let mut depth = 0;
        for operator in operators {
            match operator {
                Operator::Call { function_index } => {
                    calls.insert(*function_index);
                }
                Operator::Block { .. } | Operator::Loop { .. } | Operator::If { .. } => depth += 1,
                Operator::End => depth -= 1,
                Operator::Return => returns = true,
                Operator::Br { relative_depth } | Operator::BrIf { relative_depth } => {
                    returns |= i64::from(*relative_depth) == depth;
                }
                Operator::BrTable { targets } => {
                    let default = [Ok(targets.default())];
                    let mut depths = targets
                        .targets()
                        .chain(default)
                        .map(|target| target.expect("a target"));
                    returns |= depths.any(|target| i64::from(target) == depth);
                }
                _ => {}
            }
        }
        let ends_in_trap = matches!(operators, [.., Operator::Unreachable, Operator::End]);
        Self {
            calls,
            diverges: ends_in_trap && !returns,
        }
    }
}

/// Who calls whom, by name.
#[derive(Debug)]
struct CallGraph<'a> {
    module: &'a Module,
    /// Functions of the standard library from which control never comes back: panics and failed allocations.
    sinks: BTreeSet<u32>,
}

impl<'a> CallGraph<'a> {
    fn new(module: &'a Module) -> Self {
        let is_sink = |(index, function): (&u32, &Function)| {
            let name = module.names.get(index)?;
            let diverges = STANDARD_LIBRARY.contains(&crate_of(name)) && function.diverges;
            (diverges || name.starts_with("core::panicking::")).then_some(*index)
        };
        let sinks: BTreeSet<u32> = module.functions.iter().filter_map(is_sink).collect();
        Self { module, sinks }
    }

    /// Caller and sink of every direct call of a sink, by name.
    fn panic_callers(&self) -> impl Iterator<Item = (&str, &str)> {
        let callers = self
            .module
            .functions
            .iter()
            .filter(|(index, _)| !self.sinks.contains(index));
        callers.flat_map(|(caller, function)| {
            function
                .calls
                .intersection(&self.sinks)
                .map(|sink| (self.name(*caller), self.name(*sink)))
        })
    }

    /// The functions that reach a sink through any number of direct calls, by crate.
    fn transitive_callers(&self) -> BTreeMap<&str, BTreeSet<u32>> {
        let mut callers: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (caller, function) in &self.module.functions {
            for callee in &function.calls {
                callers.entry(*callee).or_default().push(*caller);
            }
        }
        let mut reached = self.sinks.clone();
        let mut queue: VecDeque<u32> = self.sinks.iter().copied().collect();
        while let Some(callee) = queue.pop_front() {
            for caller in callers.get(&callee).into_iter().flatten() {
                if reached.insert(*caller) {
                    queue.push_back(*caller);
                }
            }
        }
        let mut by_crate: BTreeMap<&str, BTreeSet<u32>> = BTreeMap::new();
        for index in reached.difference(&self.sinks) {
            by_crate
                .entry(crate_of(self.name(*index)))
                .or_default()
                .insert(*index);
        }
        by_crate
    }

    fn name(&self, index: u32) -> &str {
        self.module.names.get(&index).map_or("?", String::as_str)
    }
}

/// The module that ships.
fn shipped() -> Vec<u8> {
    let path = build_wasm().unwrap_or_else(|error| panic!("{error}"));
    std::fs::read(path).expect("the module can be read")
}

/// The module that ships, with the names of its functions; built apart, so that the other stays what it is.
fn named() -> Vec<u8> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("named");
    run(Command::new(env!("CARGO"))
        .current_dir(workspace_root())
        .args([
            "rustc",
            "--release",
            "--package",
            "warmroute",
            "--lib",
            "--target",
            WASM_TARGET,
        ])
        .args([
            "--crate-type",
            "cdylib",
            "--config",
            "profile.release.strip='debuginfo'",
            "--target-dir",
        ])
        .arg(&target))
    .unwrap_or_else(|error| panic!("{error}"));
    std::fs::read(target.join(WASM_TARGET).join("release/warmroute.wasm")).expect("the module can be read")
}

/// A name without hash and without what the optimiser appends.
fn demangled(symbol: &str) -> String {
    let symbol = symbol.split(".llvm.").next().unwrap_or(symbol);
    format!("{:#}", rustc_demangle::demangle(symbol))
}

/// The crate whose code a function is: that of its path, or of the type, else of the trait, that an `impl` is for.
fn crate_of(name: &str) -> &str {
    let mut rest = name;
    while let Some(inner) = rest.strip_prefix('<') {
        let subject = inner.trim_start_matches(['&', '*', '[', '(']);
        let words = ["mut ", "const ", "dyn "].iter();
        let subject = words.fold(subject, |text, word| text.strip_prefix(word).unwrap_or(text));
        let head = subject
            .split([' ', '>', ',', ']', ')'])
            .next()
            .unwrap_or_default();
        let of_trait = inner.split_once(" as ").map(|(_, of_trait)| of_trait);
        rest = match of_trait {
            _ if head.contains("::") || subject.starts_with('<') => subject,
            // A parameter or a primitive type has no code of its own.
            Some(of_trait) => of_trait,
            None => "core",
        };
    }
    match rest.split("::").next().unwrap_or(rest) {
        "_initialize" => "warmroute",
        export if export.starts_with("proxy_on_") => "proxy_wasm",
        owner => owner.strip_suffix(".command_export").map_or(owner, crate_of),
    }
}

fn is_out_of_memory(sink: &str) -> bool {
    OUT_OF_MEMORY.iter().any(|prefix| sink.starts_with(prefix))
}

fn signature(ty: &FuncType) -> String {
    let list = |types: &[wasmparser::ValType]| {
        types
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(", ")
    };
    format!("({}) -> ({})", list(ty.params()), list(ty.results()))
}

/// The lines of a committed list; `#` begins a comment.
fn committed(list: &str) -> BTreeSet<String> {
    let path: PathBuf = workspace_root().join("tests/golden").join(list);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let lines = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// Compares with the lines of a committed list.
fn assert_lines(list: &str, found: &BTreeSet<String>) {
    let committed = committed(list);
    let added: Vec<_> = found.difference(&committed).map(String::as_str).collect();
    let gone: Vec<_> = committed.difference(found).map(String::as_str).collect();
    assert!(
        added.is_empty() && gone.is_empty(),
        "tests/golden/{list} does not agree with the module\n\nonly in the module:\n{}\n\nonly in the list:\n{}\n",
        added.join("\n"),
        gone.join("\n"),
    );
}

/// 500 KB: every worker compiles the module at start, and a ConfigMap holds at most 1 MiB, in base64.
const MAX_MODULE_BYTES: usize = 500_000;

/// What an Envoy calls of the proxy-wasm ABI 0.2.1, as the SDK's `dispatcher.rs` exports it; `_initialize` is ours.
const EXPORTS: [&str; 19] = [
    "_initialize",
    "memory",
    "proxy_abi_version_0_2_1",
    "proxy_on_configure",
    "proxy_on_context_create",
    "proxy_on_delete",
    "proxy_on_done",
    "proxy_on_http_call_response",
    "proxy_on_log",
    "proxy_on_memory_allocate",
    "proxy_on_queue_ready",
    "proxy_on_request_body",
    "proxy_on_request_headers",
    "proxy_on_request_trailers",
    "proxy_on_response_body",
    "proxy_on_response_headers",
    "proxy_on_response_trailers",
    "proxy_on_tick",
    "proxy_on_vm_start",
];

const STANDARD_LIBRARY: [&str; 6] = ["alloc", "core", "hashbrown", "__rustc", "rustc", "std"];

/// Where a failed allocation, or one that no memory could hold, ends.
const OUT_OF_MEMORY: [&str; 4] = [
    "alloc::alloc::handle_alloc_error",
    "alloc::raw_vec::",
    "hashbrown::",
    "std::alloc::",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_belong_to_the_crate_of_their_code() {
        for (name, owner) in [
            ("warmroute::prompt::extract", "warmroute"),
            (
                "<warmroute::prompt::Reader as core::fmt::Display>::fmt",
                "warmroute",
            ),
            (
                "<&mut warmroute::prompt::Reader as core::fmt::Display>::fmt",
                "warmroute",
            ),
            (
                "<alloc::vec::Vec<warmroute::A> as core::ops::drop::Drop>::drop",
                "alloc",
            ),
            ("<[T] as alloc::slice::Join<V>>::join", "alloc"),
            ("<T as core::convert::Into<U>>::into", "core"),
            ("<&T as serde_json::value::Index>::index_into", "serde_json"),
            ("<<warmroute::A as core::iter::Iterator>::Item>::x", "warmroute"),
            ("<char>::escape_debug_ext", "core"),
            ("proxy_on_tick.command_export", "proxy_wasm"),
            ("_initialize", "warmroute"),
            ("malloc", "malloc"),
        ] {
            assert_eq!(crate_of(name), owner, "{name}");
        }
    }

    #[test]
    fn a_function_diverges_only_without_a_way_out() {
        let diverges = |operators: &[Operator<'_>]| Function::of(operators).diverges;
        let call = Operator::Call { function_index: 7 };
        let block = Operator::Block {
            blockty: wasmparser::BlockType::Empty,
        };
        let br = |relative_depth| Operator::BrIf { relative_depth };
        let end = || Operator::End;
        assert!(diverges(&[call.clone(), Operator::Unreachable, end()]));
        assert!(diverges(&[
            block.clone(),
            br(0),
            end(),
            Operator::Unreachable,
            end()
        ]));
        assert!(!diverges(&[
            block.clone(),
            br(1),
            end(),
            Operator::Unreachable,
            end()
        ]));
        assert!(!diverges(&[Operator::Return, Operator::Unreachable, end()]));
        assert!(!diverges(&[call.clone(), end()]));
        assert_eq!(Function::of(&[call, end()]).calls, BTreeSet::from([7]));
    }
}

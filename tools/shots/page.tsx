// The dashboard with Grafana's own components from npm. What npm lacks stands in its frame as a sentence.
import React from 'react';
import {createRoot} from 'react-dom/client';
import {lastValueFrom} from 'rxjs';
import {
  createTheme, DataFrame, dateTime, EventBusSrv, getFieldDisplayValues, standardTransformers, standardTransformersRegistry,
  ThemeContext, transformDataFrame, VizOrientation,
} from '@grafana/data';
import {BarGauge, BigValue, GlobalStyles, PanelChrome, PanelContextProvider, Table, TimeSeries} from '@grafana/ui';
import {apply} from './fields';
import {ask, Range} from './query';

const WIDTH = 1600, UNIT = 38, GAP = 8;
const given = new URLSearchParams(location.search);
const prometheus = given.get('prometheus')!, seconds = Number(given.get('seconds'));
const theme = createTheme({colors: {mode: 'dark'}});
const context = {eventsScope: 'shots', eventBus: new EventBusSrv()} as any;
const to = Math.floor(Date.now() / 1000), range: Range = {from: to - seconds, to, step: Math.max(1, Math.round(seconds / 300))};
const timeRange = {from: dateTime(range.from * 1000), to: dateTime(to * 1000), raw: {from: 'now-1h', to: 'now'}} as any;
const variables = {namespace: '.*', target: 'demo', engine: '0', __rate_interval: given.get('rate')!, __range: `${seconds}s`};
const transformers = new Map(Object.values(standardTransformers).map((t: any) => [t.id, {id: t.id, name: t.name, transformation: async () => t}]));
standardTransformersRegistry.setInit(() => [...transformers.values()] as any);

function Values({panel, frames, width, height}: any) {
  const options = panel.options;
  const found = getFieldDisplayValues({
    fieldConfig: panel.fieldConfig, reduceOptions: options.reduceOptions, replaceVariables: (text: string) => text,
    theme, data: frames, timeZone: 'utc',
  } as any);
  const down = panel.type === 'bargauge' || options.orientation === 'horizontal' || (options.orientation === 'auto' && height > width);
  const rest = GAP * (found.length - 1);
  const each = down ? {width, height: (height - rest) / found.length} : {width: (width - rest) / found.length, height};
  const textMode = options.textMode !== 'auto' ? options.textMode : found.length > 1 ? 'value_and_name' : 'value';
  const longest = found.map((value: any) => value.display.title ?? '').reduce((a: string, b: string) => b.length > a.length ? b : a, '');
  return <div style={{display: 'flex', gap: GAP, flexDirection: down ? 'column' : 'row'}}>{found.map((value: any, i: number) => {
    if (panel.type === 'stat') return <BigValue key={i} value={value.display} {...each} theme={theme} colorMode={options.colorMode}
      graphMode={options.graphMode} justifyMode={options.justifyMode} textMode={textMode}/>;
    return <BarGauge key={i} value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} {...each}
      orientation={VizOrientation.Horizontal} displayMode={options.displayMode} theme={theme} showUnfilled={options.showUnfilled}
      alignmentFactors={{title: longest, text: '100 %'} as any}/>;
  })}</div>;
}

const said = (text: string) => <div style={{padding: '2px 12px', color: theme.colors.text.secondary, textAlign: 'center'}}>{text}</div>;

function notDrawn(panel: any, frames: DataFrame[]) {
  const named = panel.targets[0].legendFormat === 'engine {{engine}}' ? 'one row per engine' : `${frames.length} rows: ` + frames.map(f => f.name).join(', ');
  return said(`Not drawn here: a ${panel.type} panel lives in Grafana's server and not in its npm packages. In Grafana: ${named}.`);
}

function content(panel: any, frames: DataFrame[], width: number, height: number) {
  if (!frames.length && panel.type !== 'stat') return said(panel.fieldConfig.defaults.noValue);
  if (panel.type === 'state-timeline') return notDrawn(panel, frames);
  if (panel.type === 'table') return <Table data={frames[0]} width={width} height={height}/>;
  if (panel.type !== 'timeseries') return <Values panel={panel} frames={frames} width={width} height={height}/>;
  return <PanelContextProvider value={context}><TimeSeries frames={frames} width={width} height={height} timeRange={timeRange} timeZone="utc"
    legend={{...panel.options.legend}}/></PanelContextProvider>;
}

async function load(panel: any): Promise<{panel: any; frames: DataFrame[]; error?: string}> {
  if (panel.type === 'row') return {panel, frames: []};
  try {
    let frames = (await Promise.all(panel.targets.map((target: any) => ask(prometheus, target, range, variables)))).flat();
    if (panel.transformations) frames = await lastValueFrom(transformDataFrame(panel.transformations, frames));
    return {panel, frames: apply(frames, panel, theme)};
  } catch (error) {
    return {panel, frames: [], error: String(error)};
  }
}

// A sentence needs no tall frame: what lies below a wide panel that is not drawn moves up.
const short = (panel: any) => panel.type === 'state-timeline' && panel.gridPos.w === 24;
const lifted = (y: number) => y - panelsOf.filter(p => short(p) && p.gridPos.y < y).reduce((sum, p) => sum + p.gridPos.h - 2, 0);

function Framed({panel, frames, error}: any) {
  const {x, w} = panel.gridPos, y = lifted(panel.gridPos.y), h = short(panel) ? 2 : panel.gridPos.h;
  const column = WIDTH / 24, width = w * column - GAP, height = h * UNIT - GAP;
  const place = {position: 'absolute', left: x * column + GAP / 2, top: y * UNIT + GAP / 2, width, height} as const;
  if (panel.type === 'row') return <div style={{...place, fontSize: 18, paddingTop: 2}}>{panel.title}</div>;
  const state = error ? 'error' : panel.type === 'state-timeline' ? 'not drawn' : frames.length ? 'drawn' : 'empty';
  return <div style={place} data-panel={panel.title} data-state={state}><PanelChrome title={panel.title} width={width} height={height}>
    {(innerWidth: number, innerHeight: number) => error ? said(error) : content(panel, frames, innerWidth, innerHeight)}
  </PanelChrome></div>;
}

const panelsOf: any[] = (await (await fetch(given.get('dashboard')!)).json()).panels;
const panels = await Promise.all(panelsOf.map(load));
const bottom = lifted(Math.max(...panelsOf.map(p => p.gridPos.y + p.gridPos.h)));
const {background, text} = theme.colors;
const canvas = {position: 'relative', width: WIDTH, height: (bottom + 1) * UNIT, background: background.canvas, color: text.primary} as const;
const foot = {position: 'absolute', left: GAP / 2, top: bottom * UNIT + GAP, color: text.secondary} as const;

const root = createRoot(document.getElementById('root')!);
const within = (what: React.ReactNode) => root.render(<ThemeContext.Provider value={theme}><GlobalStyles/>{what}</ThemeContext.Provider>);
within(null);
await new Promise(next => setTimeout(next, 100));
await Promise.all([400, 500].map(weight => document.fonts.load(`${weight} 14px Inter`))); // texts are measured once
within(<div style={canvas}>{panels.map((p: any) => <Framed key={p.panel.id} {...p}/>)}
  <div style={foot}>Drawn from a real Prometheus beside fragscope demo, with Grafana's own components.
    Marks at phase changes and restarts are not drawn.</div></div>);
(window as any).__done = true;

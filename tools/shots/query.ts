// A panel's queries as Grafana's Prometheus data source would ask them: data frames with names and labels.
import {DataFrame, FieldType, toDataFrame} from '@grafana/data';

export interface Range { from: number; to: number; step: number }
interface Series { metric: Record<string, string>; values?: [number, string][]; value?: [number, string] }

export const expand = (text: string, values: Record<string, string>) => text.replace(/\$\{?(\w+)\}?/g, (all, name) => values[name] ?? all);

function legend(format: string, labels: Record<string, string>): string {
  if (format && format !== '__auto') return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
  return Object.entries(labels).map(([name, value]) => `${name}="${value}"`).join(', ');
}

function table(refId: string, series: Series[]): DataFrame[] {
  if (!series.length) return [];
  const names = [...new Set(series.flatMap(s => Object.keys(s.metric)))];
  const labels = names.map(name => ({name, type: FieldType.string, values: series.map(s => s.metric[name] ?? '')}));
  return [toDataFrame({refId, fields: [
    {name: 'Time', type: FieldType.time, values: series.map(s => s.value![0] * 1000)},
    ...labels,
    {name: 'Value', type: FieldType.number, values: series.map(s => Number(s.value![1]))},
  ]})];
}

// A missed scrape and a mean of nothing (NaN) are holes, not straight lines over them.
function spread(points: [number, string][], range: Range): [number, number | null][] {
  const slot = (at: number) => Math.round((at - range.from) / range.step);
  const seen = new Map<number, number | null>(points.map(([at, value]) => [slot(at), value === 'NaN' ? null : Number(value)]));
  const count = Math.floor((range.to - range.from) / range.step) + 1;
  return Array.from({length: count}, (_, i) => [(range.from + i * range.step) * 1000, seen.get(i) ?? null]);
}

export async function ask(prometheus: string, target: any, range: Range, values: Record<string, string>): Promise<DataFrame[]> {
  const query = expand(target.expr, values);
  const [path, ask] = target.instant
    ? ['query', {query, time: String(range.to)}]
    : ['query_range', {query, start: String(range.from), end: String(range.to), step: String(range.step)}];
  const answer = await (await fetch(`${prometheus}/api/v1/${path}?${new URLSearchParams(ask as any)}`)).json();
  if (answer.status !== 'success') throw new Error(`${query}: ${answer.error}`);
  const series: Series[] = answer.data.result;
  if (target.format === 'table') return table(target.refId, series);
  return series.map(({metric, values, value}) => {
    const points = values ? spread(values, range) : [[value![0] * 1000, Number(value![1])] as [number, number]];
    const displayNameFromDS = legend(target.legendFormat, metric);
    return toDataFrame({name: displayNameFromDS, refId: target.refId, fields: [
      {name: 'Time', type: FieldType.time, values: points.map(p => p[0]), config: {}},
      {name: 'Value', type: FieldType.number, labels: metric, values: points.map(p => p[1]), config: {displayNameFromDS}},
    ]});
  });
}
